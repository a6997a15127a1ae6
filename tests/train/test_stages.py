"""What the stages of a run leave to one another, and what is refused before the first."""

import json
import sys
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from support.commands import main_of
from support.saved_models import save_drafter, save_target
from support.tiny import CONFIGS, DENSE, make_model

from mlx_dflash2 import load_drafter
from mlx_dflash2.train import checkpoints
from mlx_dflash2.train.corpus import Corpus, Text, write_shard
from mlx_dflash2.train.inputs import Inputs
from mlx_dflash2.train.options import parse
from mlx_dflash2.train.run import Run
from mlx_dflash2.train.training import Training

main = main_of("train")

SHAPE = "--num-layers 1 --block-size 4 --selector-rank 8 --mask-token-id 5 --target-layer-ids 1 3"
OPTIONS = (
    f"{SHAPE} --num-prompts 6 --max-tokens 12 --iters 6 --steps-per-report 3 --anchors 4 "
    "--batch-size 2 --no-cache"
).split()
EVAL = "--num-eval-prompts 2 --eval-max-tokens 8".split()


@pytest.fixture(scope="module")
def target_path(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("stages") / "target")


@pytest.fixture(scope="module")
def data(tmp_path_factory, target_path):
    folder = tmp_path_factory.mktemp("answers")
    Run(parse(["--model", str(target_path), "--output-path", str(folder), *OPTIONS])).data()
    return folder / "data"


@pytest.fixture
def make_run(tmp_path, target_path, data):
    def make_run(*options, given=tuple(OPTIONS), folder="run") -> Run:
        places = ["--model", target_path, "--output-path", tmp_path / folder, "--data", data]
        return Run(parse([*map(str, [*places, *given, *options])]))

    return make_run


def tensors(drafter) -> dict[str, mx.array]:
    return dict(tree_flatten(drafter.parameters()))


# Stages without the options of the others.


def test_export_and_eval_need_no_options_again(make_run, tmp_path, capsys):
    make_run("--factored", "--average", "0.9").fit()
    expected = tensors(make_run("--factored", "--average", "0.9").training.trained()[0])
    command = ["mlx_dflash2.train", "export", "eval", "--output-path", str(tmp_path / "run")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [*command, *EVAL])
        main()
    found = tensors(load_drafter(tmp_path / "run" / "export", dtype=mx.float32))
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert mx.array_equal(value, expected[name].astype(mx.bfloat16).astype(mx.float32)), name
    assert "decoding, temperature 0" in capsys.readouterr().out


def test_the_target_is_read_again_where_a_checkpoint_s_options_change_it(make_run):
    make_run("--dequantize").fit()
    run = make_run(given=["export"])
    before = run.inputs.loaded
    assert run.inputs.loaded is before
    run.training.saved()
    assert run.args.dequantize and run.inputs.loaded is not before


@pytest.mark.parametrize("stage", ["export", "eval"])
def test_an_option_that_is_another_one_is_refused(stage, make_run):
    make_run().fit()
    for option, value, first in (("--block-size", 5, 4), ("--selector-rank", 4, 8)):
        name = option[2:].replace("-", "_")
        with pytest.raises(
            ValueError, match=rf"^`{name}` is {value} but .* was made with {first};"
        ):
            make_run(option, value, given=[stage]).run()


def test_an_option_that_is_the_default_is_refused_where_it_was_another_one(make_run):
    make_run("--loss", "kl").fit()
    with pytest.raises(ValueError, match=r"^`loss` is 'ce' but .* was made with 'kl';"):
        make_run("--loss", "ce", given=["export"]).run()


def test_a_checkpoint_from_before_an_option_goes_on_with_its_default_said(make_run):
    make_run().fit()
    saved = checkpoints.load(make_run().training.checkpoint)
    del saved.settings["own_prompts"], saved.settings["detach_selector"]
    checkpoints.save(make_run().folder / "checkpoints", 6, saved.trees, saved.settings)
    with pytest.raises(ValueError, match=r"^.* does not state its `own_prompts`; [^\n]*$"):
        make_run().training.restored()
    assert make_run("--own-prompts", 0).training.restored().done == 6
    make_run("--own-prompts", 0, given=["export"]).run()


def test_a_frozen_part_that_has_changed_is_refused(make_run, tmp_path):
    drafter = tmp_path / "drafter"
    options = ["--draft-model", drafter, "--only", "conv", "--no-cache"]

    def run(stage: str) -> Run:
        return make_run(*options, given=[stage, "--iters", 2, "--batch-size", 2])

    save_drafter(drafter)
    run("fit").run()
    run("export").run()
    weights = mx.load(str(drafter / "model.safetensors"))
    weights["layers.0.mlp.up_proj.weight"] *= 2
    mx.eval(weights)
    mx.save_safetensors(str(drafter / "model.safetensors"), weights)
    message = r"^The weights that are not trained differ from [^\n]*$"
    for refused in (run("fit").training.restored, run("export").training.trained):
        with pytest.raises(ValueError, match=message):
            refused()


def test_texts_of_another_model_are_refused(make_run, tmp_path):
    write_shard(tmp_path / "texts.npz", [Text(np.array([1, 512, 7]), 1)])
    with pytest.raises(ValueError, match=r"^The texts of .* have an id 512 but .* embeds 512: "):
        make_run("--data", tmp_path / "texts.npz").run()


def test_unpacked_weights_are_in_float32(tmp_path):
    path = save_target(tmp_path / "packed")
    packed = make_model(DENSE, dtype=mx.bfloat16, bits=4)
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(packed.parameters())))
    config = json.loads((path / "config.json").read_text())
    config["quantization"] = {"group_size": 32, "bits": 4}
    (path / "config.json").write_text(json.dumps(config))
    model, _ = Run(parse(["--model", str(path), "--dequantize"])).inputs.loaded
    assert {value.dtype for _, value in tree_flatten(model.parameters())} == {mx.float32}


def test_a_checkpoint_of_other_shapes_is_refused(make_run):
    run = make_run()
    run.fit()
    saved = checkpoints.load(run.training.checkpoint)
    saved.trees["weights"]["fc"]["weight"] = mx.zeros((2, 2))
    checkpoints.save(run.folder / "checkpoints", 7, saved.trees, saved.settings)
    with pytest.raises(ValueError, match=r"^The checkpoint's `fc\.weight` is \(2, 2\) but [^\n]*$"):
        run.training.trained()


def test_what_decides_is_taken_and_the_rest_is_as_given(tmp_path):
    stored = checkpoints.deciding(parse(["--iters", "5", "--block-size", "8"])) | {"processes": 2}
    args = checkpoints.as_trained(parse(["eval", "--eval-temp", "0.5"]), stored, tmp_path)
    assert (args.iters, args.block_size, args.eval_temp) == (5, 8, [0.5])
    assert args.stage == ["eval"] and not hasattr(args, "processes")


def test_a_checkpoint_that_does_not_say_how_it_was_made_is_refused(make_run):
    """What was the default then need not be now."""
    make_run("--rope-theta", 5e4).fit()
    saved = checkpoints.load(make_run().training.checkpoint)
    del saved.settings["rope_theta"]
    checkpoints.save(make_run().folder / "checkpoints", 6, saved.trees, saved.settings)
    for refused in (make_run().training.restored, make_run(given=["export"]).run):
        with pytest.raises(ValueError, match=r"^.* does not state its `rope_theta`; [^\n]*$"):
            refused()
    assert make_run("--rope-theta", 5e4).training.restored().done == 6


# A run that stops, an export of another step.


def test_stages_behind_an_unfinished_fit_wait_for_it(make_run, capsys):
    stages = ["fit", "export", "eval", *OPTIONS, *EVAL]
    run = make_run("--time-limit", "1e-9", given=stages)
    run.run()
    assert checkpoints.load(run.training.checkpoint).step == 0
    assert "fit: stopped at step 0 of 6; the same command resumes." in capsys.readouterr().err
    assert not (run.folder / "export").exists() and not (run.folder / "eval.json").exists()
    run = make_run(given=stages)
    run.run()
    assert json.loads((run.folder / "export.json").read_text()) == {"step": 6, "bits": None}
    found = json.loads((run.folder / "eval.json").read_text())
    assert (found["measured"], found["step"]) == ("export", 6)


def test_an_export_of_the_same_step_is_kept_and_of_another_refused(make_run, capsys):
    make_run().fit()
    make_run(given=["export"]).run()
    written = (make_run().folder / "export" / "model.safetensors").stat().st_mtime_ns
    make_run(given=["export"]).run()
    assert "is of step 6 already" in capsys.readouterr().err
    assert (make_run().folder / "export" / "model.safetensors").stat().st_mtime_ns == written
    with pytest.raises(ValueError, match=r"^.* step 6 \(bfloat16\) but step 6 \(8 bits\) .*$"):
        make_run("--bits", 8, given=["export"]).run()
    saved = checkpoints.load(make_run().training.checkpoint)
    checkpoints.save(make_run().folder / "checkpoints", 9, saved.trees, saved.settings)
    with pytest.raises(ValueError, match=r"^.*export is of step 6 .* step 9 .*; remove [^\n]*$"):
        make_run(given=["export"]).run()
    # A stale export is not what is measured, and its card does not change.
    card = (make_run().folder / "export" / "README.md").read_text()
    make_run(*EVAL, given=["eval"]).run()
    assert "eval: the checkpoint of step 9 is measured." in capsys.readouterr().err
    assert (make_run().folder / "export" / "README.md").read_text() == card


def test_the_card_holds_the_latest_results_once(make_run):
    make_run().fit()
    make_run(given=["export"]).run()
    for tokens in (4, 8):
        make_run("--num-eval-prompts", 2, "--eval-max-tokens", tokens, given=["eval"]).run()
    card = (make_run().folder / "export" / "README.md").read_text()
    assert card.count("## Held-out prompts") == 1
    # Four prompts: the template knows thinking, so each comes twice.
    assert "4 prompts, 32 tokens" in card


def test_a_card_says_no_more_than_is_known(make_run, target_path):
    run = make_run()
    run.fit()
    saved = checkpoints.load(run.training.checkpoint)
    settings = saved.settings | {"processes": 3}
    checkpoints.save(run.folder / "checkpoints", 6, saved.trees, settings)
    make_run(given=["export"]).run()
    card = " ".join((run.folder / "export" / "README.md").read_text().split())
    # 6 steps of 2 texts with 4 anchors in 3 processes.
    assert "at most 144 blocks" in card and "tokens of given answers" in card
    assert "drafter for target " in card and str(target_path) not in card


def test_a_hub_s_target_keeps_its_whole_name(make_run, monkeypatch):
    run = make_run()
    run.fit()
    args, loaded = run.training.drafter_args(), run.inputs.loaded
    monkeypatch.setattr(Inputs, "name", "someone/model")
    monkeypatch.setattr(Inputs, "loaded", loaded)
    monkeypatch.setattr(Training, "drafter_args", lambda self: args)
    run.export()
    assert "--model someone/model " in (run.folder / "export" / "README.md").read_text()


# What is recorded of a run.


def test_a_run_does_not_go_on_with_other_texts(make_run, data, tmp_path):
    make_run().fit()
    texts = [text._replace(tokens=(text.tokens + 1) % 512) for text in Corpus(data)]
    other = tmp_path / "other"
    other.mkdir()
    write_shard(other / "shard-00000.npz", texts)
    run = make_run()
    run.args.data = str(other)
    trainer = run.training.trainer()
    settings = run.training.settings(trainer)
    assert settings["corpus"] != make_run().training.settings(trainer)["corpus"]
    assert settings["tap_dtype"] == "float32"
    with pytest.raises(ValueError, match=r"^`data` is .* was made with .*$"):
        run.training.restored()


def test_a_run_does_not_go_on_with_taps_of_another_precision(make_run):
    make_run().fit()
    cached = make_run()
    cached.args.no_cache = False
    cached.taps()
    with pytest.raises(ValueError, match=r"^`tap_dtype` is 'bfloat16' but .* with 'float32'; .*$"):
        cached.training.restored()


def test_texts_still_to_be_written_are_noted(make_run, data, tmp_path, capsys):
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "shard-00000.npz").write_bytes((data / "shard-00000.npz").read_bytes())
    record = json.loads((data / "corpus.json").read_text())
    (tmp_path / "part" / "corpus.json").write_text(json.dumps(record | {"count": 20}))
    run = make_run()
    run.args.data = str(tmp_path / "part")
    run.fit()
    missing = 20 - record["count"]
    assert f"fit: {missing} texts of {tmp_path / 'part'} are still to be" in capsys.readouterr().err


# What is refused before the first stage.


@pytest.mark.parametrize("options, message", [
    (["--iters", "0"], r"`iters` is 0 but has to be 1 or more\."),
    (["--gamma", "0"], r"`gamma` is 0\.0 but has to be above 0\."),
    (["--clip", "0"], r"`clip` is 0\.0 but has to be above 0\."),
    (["--warmup", "1"], r"`warmup` is 1\.0 but has to be 0 or more and below 1\."),
    (["--average", "-0.5"], r"`average` is -0\.5 but has to be 0 or more and below 1\."),
    (["--save-every", "0"], r"`save_every` is 0 .*"),
    (["--time-limit", "0"], r"`time_limit` is 0\.0 .*"),
    (["--learning-rate", "nan"], r"`learning_rate` is nan .*"),
    (["--eval-temp", "0", "-1"], r"`eval_temp` is -1\.0 .*"),
    (["--top-p", "0"], r"`top_p` is 0\.0 .*"),
    (["--top-p", "1.5"], r"`top_p` is 1\.5 .*"),
    (["--temp", "-0.5"], r"`temp` is -0\.5 .*"),
    (["--max-tokens", "0"], r"`max_tokens` is 0 .*"),
    (["--max-seq-length", "1"], r"`max_seq_length` is 1 .*"),
    (["--seed", "-1"], r"`seed` is -1 .*"),
    (["--data-batch-size", "0"], r"`data_batch_size` is 0 .*"),
    (["--num-eval-prompts", "1000000"], r"`count` is 1000000 but has to be from 1 to .*"),
    (["--eval-prompts", "nothing.txt"], r"There is no file of prompts .*"),
    (["--selector-rank", "0"], r".*`(dflash_config\.)?selector_rank`.*"),
    (["--mask-token-id", "512"], r".*`mask_token_id` is 512 .*"),
    (["--num-layers", "5"], r"`init` from the target needs it to have 5 layers .*; use random\."),
    (["--only", "head"], r"`only` has to name some of .*"),
    (["--only", "conv", "--conv-kernel-size", "0"], r"The drafter has no conv to train\."),
    (["--vocab-sample", "7"], r"`vocab_sample` is 7 but has to be from `selector_top_k`, .*"),
    (["--vocab-sample", "512"], r"`vocab_sample` is 512 but has to be .* to 511: .*"),
    (["--vocab-sample", "500"], r"`negatives` is 512 but has to be from 1 to 12, .*"),
    (["--thinking", "on", "--model", "raw"], r"`thinking` is 'on' but .*"),
])  # fmt: skip
def test_what_cannot_work_is_refused_before_the_first_stage(
    options, message, make_run, model_folders
):
    options = [str(model_folders / "raw") if option == "raw" else option for option in options]
    run = make_run(*options, given=["fit", "export", "eval", *OPTIONS])
    with pytest.raises((ValueError, FileNotFoundError), match=rf"^{message}$"):
        run.run()
    assert not run.folder.exists()


def test_a_prompt_file_is_looked_for_before_the_first_stage(make_run):
    run = make_run("--prompts", "nothing.jsonl", given=["data", *OPTIONS])
    run.args.data = None
    with pytest.raises(FileNotFoundError, match=r"^There is no file of prompts [^\n]*$"):
        run.run()


def test_a_drafter_without_selector_may_be_trained_and_without_both_parts_exported(make_run):
    make_run("--selector-rank", 0, given=["fit", *OPTIONS]).run()
    parts = ["--selector-rank", 0, "--conv-kernel-size", 0]
    run = make_run(*parts, given=["fit", "export", *OPTIONS], folder="first")
    run.run()
    assert load_drafter(run.folder / "export").args.generation == 1


# Options that decide what is trained.


def test_gamma_is_half_of_the_block_or_what_is_given(make_run):
    assert make_run().training.trainer().objective.gamma == 2.0
    assert make_run("--gamma", 0.5).training.trainer().objective.gamma == 0.5


def test_rotations_are_as_asked_for(make_run):
    assert make_run().training.drafter_args().rope_parameters[0]["rope_theta"] == 10000.0
    chosen = make_run("--rope-theta", 5e5).training.drafter_args()
    assert chosen.rope_parameters[0]["rope_theta"] == 5e5


def test_factoring_trained_codebooks_is_told_and_not_frozen(make_run, tmp_path, capsys):
    draft = ["--draft-model", save_drafter(tmp_path / "drafter"), "--factored", "--no-cache"]
    run = make_run(*draft, "--batch-size", 2, given=["fit"])
    run.training.trainer()
    said = capsys.readouterr().err
    # The tables are random: a product of the embedding holds some of them.
    kept = int(said.partition("keep ")[2].partition("%")[0])
    assert 10 < kept < 90
    with pytest.raises(ValueError, match=r"^`factored` changes the selector of .* `only` is conv;"):
        make_run(*draft, "--only", "conv", given=["fit"]).run()


@pytest.mark.parametrize("thinking, count", [("on", 6), ("off", 6), ("both", 12)])
def test_prompts_are_answered_with_the_thinking_asked_for(thinking, count, make_run):
    run = make_run("--thinking", thinking)
    run.args.data = None
    run.data()
    assert len(run.inputs.corpus()) == count


def test_recall_without_greedy_answers_is_noted(make_run, capsys):
    make_run().fit()
    make_run(*EVAL, "--eval-temp", 1, given=["eval"]).run()
    assert "eval: recall is skipped" in capsys.readouterr().err


def test_a_target_s_config_decides_what_is_not_chosen(make_run, monkeypatch):
    run = make_run(given=["fit", *OPTIONS])
    monkeypatch.setattr(Inputs, "loaded", run.inputs.loaded)

    def args_for(config):
        # Not from a file: mlx-lm's qwen3 does not read all of these.
        monkeypatch.setattr(Inputs, "source", SimpleNamespace(config=config))
        return run.training.drafter_args()

    for changes, theta in (
        ({"rope_theta": 5e5}, 5e5),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 3e5}}, 3e5),
        ({"rope_theta": None, "rope_scaling": {"rope_theta": 2e5}}, 2e5),
        ({"rope_theta": None, "text_config": {"rope_theta": 4e5}}, 4e5),
        ({"rope_theta": None, "rope_parameters": {"full_attention": {"rope_theta": 6e5}}}, 6e5),
        # As mlx-lm computes with it.
        ({"rope_theta": None}, 1e4),
    ):
        text = CONFIGS[DENSE] | {"model_type": "qwen3"} | changes
        assert args_for(text).rope_parameters[0]["rope_theta"] == theta
    del text["intermediate_size"]
    assert args_for(text).intermediate_size == 96
