"""The train command from prompts to an exported drafter, and how it is evaluated."""

import json
import sys

import mlx.core as mx
import numpy as np
import pytest
from support.commands import main_of
from support.saved_models import save_target

from mlx_dflash2 import load_drafter
from mlx_dflash2.drafter.variants import without_selector
from mlx_dflash2.evaluation.prompts import Prompt
from mlx_dflash2.targets import bind
from mlx_dflash2.train import evaluate
from mlx_dflash2.train.corpus import Corpus
from mlx_dflash2.train.options import parse
from mlx_dflash2.train.run import Run
from mlx_dflash2.train.taps import ComputedTaps
from tools import ablation
from tools.chain import Chain, chain

main = main_of("train")

OPTIONS = (
    "--num-prompts 6 --max-tokens 12 --num-layers 1 --block-size 4 --selector-rank 8 "
    "--mask-token-id 5 --target-layer-ids 1 3 --iters 6 --steps-per-report 3 --anchors 4 "
    "--batch-size 2 --num-eval-prompts 2 --eval-max-tokens 8 --factored"
).split()


@pytest.fixture(scope="module")
def target_path(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("train") / "target")


def train(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["mlx_dflash2.train", *map(str, arguments)])
    main()


def test_all_stages_make_a_drafter_that_loads(monkeypatch, tmp_path, target_path, capsys):
    options = ["--model", target_path, "--output-path", tmp_path / "run", *OPTIONS]
    train(monkeypatch, *options)
    drafter = load_drafter(tmp_path / "run" / "export")
    assert drafter.args.block_size == 4 and drafter.args.target_layer_ids == [1, 3]
    codebook = drafter.candidate_selector.predecessor_codebook.weight
    assert codebook.shape == (512, 8) and drafter.dtype == mx.bfloat16
    found = json.loads((tmp_path / "run" / "eval.json").read_text())
    decoding = found["decoding"]["0"]
    # The tiny template knows thinking: every prompt comes with and without it.
    assert decoding["prompts"] == 4 and 1 <= decoding["acceptance_length"] <= 4
    printed = capsys.readouterr()
    assert f"{decoding['acceptance_length']:.2f}" in printed.out
    assert f"{decoding['acceptance_length']:.2f}" in (tmp_path / "run/export/README.md").read_text()
    assert (tmp_path / "run" / "training.png").is_file()
    lines = (tmp_path / "run" / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [3, 6]


def test_the_exported_drafter_is_what_eval_measures(monkeypatch, tmp_path, target_path):
    options = ["--model", target_path, "--output-path", tmp_path / "run", *OPTIONS]
    train(monkeypatch, "data", "taps", "fit", "export", *options, "--bits", 8)
    seen = []
    monkeypatch.setattr(
        "mlx_dflash2.train.run.evaluate",
        lambda model, tokenizer, drafter, *_, **__: (
            seen.append(drafter) or {"decoding": {}, "recall": None}
        ),
    )
    train(monkeypatch, "eval", *options)
    assert "scales" in seen[0].fc


def test_stages_say_what_they_miss(monkeypatch, tmp_path, target_path):
    options = ["--model", target_path, "--output-path", tmp_path / "run", *OPTIONS]
    for stage, missing in (
        ("taps", "shard"),
        ("export", "run the fit stage first"),
        ("eval", "run the fit stage first"),
    ):
        with pytest.raises(SystemExit, match=missing) as error:
            train(monkeypatch, stage, *options)
        assert "\n" not in str(error.value)
    train(monkeypatch, "data", *options)
    with pytest.raises(SystemExit, match="run the taps stage first"):
        train(monkeypatch, "fit", *options)


@pytest.fixture(scope="module")
def memorised(tmp_path_factory, target_path):
    """A run whose drafter knows much of its few texts by heart."""
    options = [*OPTIONS, "--iters", "60", "--learning-rate", "0.01", "--max-tokens", "24"]
    options += ["--model", str(target_path), "--no-cache"]
    run = Run(parse([*options, "--output-path", str(tmp_path_factory.mktemp("memorised"))]))
    run.data()
    run.fit()
    return run


@pytest.mark.parametrize("selector", [True, False])
def test_a_chain_counts_the_rounds_of_decoding(memorised, selector):
    drafter, corpus, _ = memorised.training.trained()
    drafter = drafter if selector else without_selector(drafter)
    source = ComputedTaps(memorised.inputs.target, corpus, drafter.target_layer_ids, final=False)
    counted = chain(drafter, memorised.inputs.target, corpus, source, range(len(corpus)))
    prompts = [Prompt(t.kind, "", tuple(t.tokens[: t.prompt_length].tolist())) for t in corpus]
    decoded = evaluate.answer_prompts(*memorised.inputs.loaded, drafter, prompts, max_tokens=24)
    assert [d.tokens for d in decoded] == [t.tokens[t.prompt_length :].tolist() for t in corpus]
    assert counted.path.tolist() == [d.stats.rounds for d in decoded]
    assert counted.tokens.tolist() == [d.from_rounds for d in decoded]
    assert (counted.oracle <= np.minimum(counted.best, counted.path)).all()
    assert counted.lengths()["path"] == pytest.approx(
        evaluate.acceptance(decoded)["acceptance_length"]
    )
    # Only a drafter that is often right can tell a right count from a wrong one.
    assert counted.lengths()["path"] > 1.5


def test_acceptance_is_pooled_over_rounds():
    def answer(kind, accepted, bonus, rounds, drafted_at, accepted_at):
        stats = evaluate.Stats(
            prefills=1, rounds=rounds, accepted=accepted, bonus=bonus,
            drafted_at=drafted_at, accepted_at=accepted_at,
        )  # fmt: skip
        return evaluate.Answer(kind, (1, 2), [0] * (1 + accepted + bonus), stats)

    found = evaluate.acceptance(
        [answer("a", 6, 4, 4, [4, 4], [4, 2]), answer("b", 0, 2, 2, [2, 2, 2], [0, 0, 0])]
    )
    assert found["acceptance_length"] == pytest.approx(12 / 6)
    assert found["by_kind"] == {"a": pytest.approx(2.5), "b": pytest.approx(1.0)}
    assert found["by_position"] == [pytest.approx(4 / 6), pytest.approx(2 / 6), 0.0]
    low, high = found["interval"]
    assert 1.0 <= low < 2.0 < high <= 2.5
    assert found["tokens"] == 14 and found["rounds"] == 6


def test_the_ablation_compares_matched_drafters(tmp_path, target_path):
    options = ["--model", str(target_path), "--output-path", str(tmp_path), *OPTIONS, "--no-cache"]
    Run(parse(["data", *options])).data()
    options = [*options, "--data", str(tmp_path / "data")]
    drafters = ablation.train(tmp_path, options, layers=1)
    assert list(drafters) == [
        "DFlash",
        "DFlash + selector",
        "DFlash + convolution",
        "DFlash 2",
        "DFlash, twice the layers",
    ]
    plain, deep = drafters["DFlash"], drafters["DFlash, twice the layers"]
    assert (len(plain.layers), len(deep.layers)) == (1, 2) and not plain.args.has_conv
    # The selector is beside its drafter: the rest of it is the one without.
    same = drafters["DFlash + selector"]
    assert mx.array_equal(plain.layers[0].mlp.up_proj.weight, same.layers[0].mlp.up_proj.weight)
    run = Run(parse(options))
    pair, held_out = dict(list(drafters.items())[:2]), Corpus(tmp_path / "data")
    found = ablation.measure(pair, run, held_out, num_decoded=2, max_tokens=6)
    assert found["DFlash + selector"]["parameters"] > found["DFlash"]["parameters"]
    assert set(found["DFlash"]["decoding"]) == {"0", "1"}
    lines = ablation.table(found).splitlines()
    assert len(lines) == 4 and "+0.0% (+0.0% to +0.0%)" in lines[2]
    plain, path = (found[name]["chain"] for name in pair)
    assert path["gain"] == pytest.approx(path["path"] / plain["path"] - 1)
    assert path["gain_interval"][0] <= path["gain"] <= path["gain_interval"][1]
    ablation.save(found, tmp_path / "results")
    assert json.loads((tmp_path / "results" / "ablation.json").read_text()) == found
    assert (tmp_path / "results" / "ablation.png").is_file()


def test_gains_are_paired_over_prompts():
    """Every prompt takes two thirds of the rounds: the gain is certain, the length is not."""
    tokens, rounds = np.array([60, 60, 60]), np.array([60, 30, 12])
    first = Chain(tokens, rounds, rounds, rounds)
    found = ablation.spread(first._replace(path=rounds * 2 // 3), first)
    assert found["gain"] == pytest.approx(0.5)
    assert found["gain_interval"] == pytest.approx([0.5, 0.5])
    assert found["interval"][0] < 2 < found["interval"][1]


def test_all_runs_are_held_against_the_same_prompts():
    runs = [Run(parse(["--seed", seed, "--num-prompts", "5"])) for seed in "07"]
    first, second = ([row.messages for row in run.inputs.chats("held_out")] for run in runs)
    assert first == second
    first, second = ([row.messages for row in run.inputs.chats("train")] for run in runs)
    assert first != second


def test_the_ablation_begins_from_one_trained_drafter(tmp_path, target_path):
    options = ["--model", str(target_path), "--output-path", str(tmp_path), *OPTIONS, "--no-cache"]
    Run(parse(["data", *options])).data()
    # Runs that learn nothing are still what they began from.
    options = [*options, "--data", str(tmp_path / "data"), "--learning-rate", "0"]
    start = ["--learning-rate", "0.01", "--iters", "3"]
    drafters = ablation.train(tmp_path, options, layers=1, start=start)
    first = load_drafter(tmp_path / "start" / "export", dtype=mx.float32)
    assert not first.args.has_conv and not first.args.has_selector
    expected = first.layers[0].mlp.up_proj.weight
    for name, drafter in drafters.items():
        assert mx.array_equal(drafter.layers[0].mlp.up_proj.weight, expected), name
        assert drafter.args.has_conv == (name in ("DFlash + convolution", "DFlash 2"))
    added = drafters["DFlash, twice the layers"].layers[1]
    assert not added.mlp.down_proj.weight.any().item()


@pytest.mark.slow
def test_the_published_package_drafts_the_same_from_an_export(monkeypatch, tmp_path, target_path):
    published = pytest.importorskip("dflash.model_mlx")
    options = ["--model", target_path, "--output-path", tmp_path / "run", *OPTIONS]
    train(monkeypatch, "data", "taps", "fit", "export", *options, "--learning-rate", "0.01")
    path = tmp_path / "run" / "export"
    monkeypatch.setattr(published, "snapshot_download", lambda *_, **__: path)
    model, _ = Run(parse(["--model", str(target_path)])).inputs.loaded
    theirs, ours, target = (
        published.load_draft(str(path)).bind(model),
        load_drafter(path),
        bind(model),
    )
    corpus = Corpus(tmp_path / "run" / "data")
    for text in corpus:
        tokens = mx.array(text.tokens)[None]
        taps = target.forward(tokens, target.make_cache(), ours.target_layer_ids).taps
        anchor = text.prompt_length
        context = ours.make_context()
        ours.extend(context, tokens[0, :anchor], taps[:, :anchor], 0)
        drafted = ours.propose(target, tokens[0, anchor : anchor + 1], context, 4).tokens
        block = mx.concatenate([tokens[:, anchor : anchor + 1], mx.full((1, 3), 5, mx.uint32)], 1)
        found = theirs.propose(block, taps[:, :anchor], theirs.make_cache(), 0.0, 1)
        found = found[0] if isinstance(found, tuple) else found
        assert found.flatten().tolist() == drafted.tolist()
