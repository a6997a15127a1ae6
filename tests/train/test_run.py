"""The stages of a run, each from what the ones before it left on disk."""

import json

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from support.training import random_corpus

from mlx_dflash2.train import checkpoints
from mlx_dflash2.train.codebooks import FactoredCodebook
from mlx_dflash2.train.options import parse
from mlx_dflash2.train.run import Run
from mlx_dflash2.train.vocabulary import SampledVocabulary

SMALL = (
    "--num-layers 1 --block-size 5 --target-layer-ids 0 2 --selector-rank 8 --selector-top-k 8 "
    "--iters 6 --batch-size 2 --anchors 4 --learning-rate 1e-3 --steps-per-report 2 --init random"
).split()


@pytest.fixture
def make_run(model_folders, tmp_path):
    random_corpus(tmp_path / "texts", [12, 20, 16, 14, 18], [3, 4, 5, 6, 7])

    def make_run(*options: str, folder: str = "out") -> Run:
        places = ["--model", str(model_folders / "target"), "--output-path", str(tmp_path / folder)]
        return Run(parse([*places, "--data", str(tmp_path / "texts"), *SMALL, *options]))

    return make_run


def saved(run: Run) -> checkpoints.Saved:
    return checkpoints.load(checkpoints.files(run.folder / "checkpoints")[-1])


def test_a_run_trains_to_its_end(make_run):
    sample = "--vocab-sample", "50", "--negatives", "60"
    run = make_run("--labels", "soft", "--loss", "lk", "--d-pace", *sample)
    run.taps()
    run.fit()
    assert saved(run).step == 6
    lines = (run.folder / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [2, 4, 6]
    assert isinstance(run.training.trainer().vocabulary, SampledVocabulary)


def test_a_run_in_two_goes_is_one(make_run):
    """However often it stops, the same command goes on."""
    whole, parts = make_run(folder="whole"), make_run(folder="parts")
    for run in (whole, parts):
        run.taps()
    whole.fit()
    for step in range(1, 7):
        trainer = parts.training.restored()
        trainer.step()
        checkpoints.save(
            parts.folder / "checkpoints", step, trainer.state, parts.training.settings(trainer)
        )
    one, other = (dict(tree_flatten(saved(run).trees)) for run in (whole, parts))
    assert one.keys() == other.keys()
    assert all(mx.array_equal(one[name], other[name]) for name in one)


def test_taps_may_be_computed_instead(make_run):
    cached, computed = make_run(folder="one"), make_run("--no-cache", folder="two")
    for run in (cached, computed):
        run.taps()
    assert not (computed.folder / "taps").exists()
    losses = [run.training.trainer().step()["loss"] for run in (cached, computed)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_other_settings_do_not_go_on(make_run):
    run = make_run("--no-cache")
    run.fit()
    with pytest.raises(ValueError, match=r"^`batch_size` is 1 but [^\n]* was made with 2; [^\n]*$"):
        make_run("--no-cache", "--batch-size", "1").training.restored()
    # How often it is saved changes nothing that is computed.
    assert make_run("--no-cache", "--save-every", "1").training.restored().done == 6


def test_a_run_may_train_on_shorter_blocks(make_run):
    """They are as long as before once it is exported; its log has fewer positions."""
    run = make_run("--train-block-size", "3", "--no-cache")
    run.fit()
    line = json.loads((run.folder / "log.jsonl").read_text().splitlines()[-1])
    assert len(line["best"]) == 2
    run.export()
    assert json.loads((run.folder / "export" / "config.json").read_text())["block_size"] == 5


def test_blocks_are_not_longer_in_training(make_run):
    with pytest.raises(ValueError, match=r"^`train_block_size` is 6 but [^\n]* 5 rows\.$"):
        make_run("fit", "--train-block-size", "6", "--no-cache").check()


def test_fit_without_taps_names_the_stage(make_run):
    with pytest.raises(FileNotFoundError, match=r"^[^\n]* run the taps stage first\.$"):
        make_run().fit()


def test_fit_does_not_read_other_layers_taps(make_run):
    make_run().taps()
    with pytest.raises(
        ValueError, match=r"^`layers` is \[0, 1\] but [^\n]* with \[0, 2\]; [^\n]*$"
    ):
        make_run("--target-layer-ids", "0", "1").fit()


@pytest.mark.parametrize("options, trained", [
    ([], {"backbone", "conv", "selector"}),
    (["--only", "conv,selector"], {"conv", "selector"}),
], ids=["all", "parts"])  # fmt: skip
def test_a_run_may_begin_from_a_drafter(options, trained, make_run, model_folders):
    """Its sizes are the drafter's, and its codebooks may be factored."""
    draft = ["--draft-model", str(model_folders / "drafter"), "--factored", "--no-cache"]
    run = make_run(*draft, *options)
    for name in ("num_layers", "block_size", "target_layer_ids", "selector_rank", "selector_top_k"):
        setattr(run.args, name, None)
    drafter = run.training.drafter()
    assert drafter.block_size == 4 and len(drafter.layers) == 2
    assert isinstance(drafter.candidate_selector.predecessor_codebook, FactoredCodebook)
    names = [name for name, _ in tree_flatten(drafter.trainable_parameters())]
    parts = {
        "selector" if "selector" in n else "conv" if "_conv" in n else "backbone" for n in names
    }
    assert parts == trained
    assert np.isfinite(run.training.trainer().step()["loss"])
