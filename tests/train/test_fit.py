"""The training loop: it learns, stops and goes on as if it had not, and refuses to break."""

import json
from dataclasses import replace
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from support.tiny import CONFIGS, DENSE, make_model
from support.training import greedy_corpus

from mlx_dflash2.evaluation.teacher_forced import TextPass, acceptance_length, measure_drafts
from mlx_dflash2.targets import bind
from mlx_dflash2.train import checkpoints
from mlx_dflash2.train import trainer as trainer_module
from mlx_dflash2.train.batches import Batches
from mlx_dflash2.train.objective import Objective
from mlx_dflash2.train.shape import Shape, new_args
from mlx_dflash2.train.start import freeze_but, new_drafter, part_of
from mlx_dflash2.train.taps import ComputedTaps
from mlx_dflash2.train.trainer import Diverged, Schedule, Trainer, fit
from mlx_dflash2.train.vocabulary import FullVocabulary, SampledVocabulary, most_frequent

SHAPE = Shape(
    num_layers=1, block_size=6, target_layer_ids=[0, 1, 3], selector_rank=8, selector_top_k=8
)
SCHEDULE = Schedule(iters=20, learning_rate=3e-3, seed=5)


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    """A target and its own answers."""
    model = make_model(DENSE)
    return bind(model), greedy_corpus(tmp_path_factory.mktemp("texts"), model, 8, 36)


def make_trainer(
    setup, schedule=SCHEDULE, objective=None, only=(), soft=False, sample=0, selector=8
) -> Trainer:
    """A fresh one, always the same."""
    target, corpus = setup
    shape = replace(SHAPE, selector_rank=selector)
    drafter = new_drafter(new_args(shape, target, CONFIGS[DENSE]), mx.random.key(2))
    if only:
        freeze_but(drafter, only)
    source = ComputedTaps(target, corpus, drafter.target_layer_ids, soft)
    batches = Batches(
        corpus, source, range(8), batch_size=2, anchors=6, max_seq_length=40, seed=schedule.seed
    )
    vocabulary = FullVocabulary(target, drafter.args)
    if sample:
        frequent = most_frequent(corpus.tokens, sample, vocabulary.vocab_size)
        vocabulary = SampledVocabulary(target, drafter.args, frequent, 32)
    return Trainer(drafter, target, vocabulary, batches, objective or Objective(), schedule)


def copied(tree) -> dict[str, np.ndarray]:
    return {name: np.array(value) for name, value in tree_flatten(tree)}


def assert_same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.dtype == other[name].dtype and np.array_equal(value, other[name]), name


def load_weights(trainer: Trainer):
    """Put the trained weights into the drafter, in float32."""
    trainer.drafter.update(trainer.weights)
    trainer.drafter.eval()


RUNS = {
    "plain": {},
    "averaged, accumulated": dict(
        schedule=replace(SCHEDULE, average=0.9, grad_accumulation_steps=2)
    ),
    "d-pace, soft": dict(objective=Objective("lk", gamma=None), soft=True),
    "sampled": dict(sample=60),
    "bfloat16, checkpointed": dict(
        schedule=replace(SCHEDULE, dtype="bfloat16"), objective=Objective(checkpoint=True)
    ),
    "parts": dict(only=("conv", "selector")),
    "no selector": dict(selector=0),
}


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)
def test_a_resumed_run_is_the_same_run(options, setup, tmp_path):
    """Losses, weights, average and optimizer, bit for bit."""
    straight = make_trainer(setup, **options)
    losses = [straight.step()["loss"] for _ in range(8)]
    first = make_trainer(setup, **options)
    found = [first.step()["loss"] for _ in range(4)]
    checkpoints.save(tmp_path, first.done, first.state, {"a": 1})
    second = make_trainer(setup, **options)
    saved = checkpoints.load(checkpoints.files(tmp_path)[-1])
    assert saved.settings == {"a": 1}
    second.restore(saved)
    found += [second.step()["loss"] for _ in range(4)]
    assert found == losses and second.done == 8
    assert_same(copied(straight.state), copied(second.state))


def test_training_lengthens_what_is_accepted(setup):
    """On the tiny target's own answers, as decoding would accept it."""
    target, corpus = setup
    trainer = make_trainer(setup, Schedule(iters=80, learning_rate=5e-3))

    def length() -> float:
        load_weights(trainer)
        hits = []
        for text in list(corpus)[:3]:
            passed = TextPass(
                target, text.tokens.tolist(), text.prompt_length, SHAPE.target_layer_ids
            )
            hits.append(measure_drafts(trainer.drafter, passed, passed.anchors(5)).path)
        trainer.drafter.train()
        return acceptance_length(np.concatenate(hits))

    untrained, losses = length(), []
    for _ in range(80):
        losses.append(trainer.step()["loss"])
    assert np.mean(losses[-10:]) < 0.6 * np.mean(losses[:10])
    assert length() > untrained + 0.5


def test_fit_writes_a_log_and_its_checkpoints(setup, tmp_path):
    trainer = make_trainer(setup)
    assert fit(trainer, tmp_path, {"seed": 5}, steps_per_report=5, save_every=8)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [5, 10, 15, 20]
    assert all(line["length"] >= 1 and len(line["best"]) == 5 for line in lines)
    names = [file.name for file in checkpoints.files(tmp_path / "checkpoints")]
    assert names == ["step-00000016.safetensors", "step-00000020.safetensors"]


def test_fit_stops_when_its_time_is_over_and_goes_on(setup, tmp_path):
    trainer = make_trainer(setup)
    assert not fit(trainer, tmp_path, {}, stop_after=0.0)
    saved = checkpoints.load(checkpoints.files(tmp_path / "checkpoints")[-1])
    assert saved.step == trainer.done < 20


class Replaced:
    """Batches of which one is not what it should be."""

    def __init__(self, batches: Batches, number: int, change):
        self.batches, self.number, self.change = batches, number, change

    def batch(self, number: int):
        batch = self.batches.batch(number)
        return self.change(batch) if number == self.number else batch


def test_numbers_that_are_none_stop_the_run_and_leave_its_weights(setup, tmp_path):
    trainer = make_trainer(setup, replace(SCHEDULE, grad_accumulation_steps=2, average=0.9))
    trainer.batches = Replaced(
        trainer.batches, 7, lambda batch: batch._replace(taps=batch.taps * mx.nan)
    )
    for _ in range(3):
        trainer.step()
    before = copied(trainer.state)
    with pytest.raises(Diverged, match=r"^Step 4, batch 6: the loss is nan, .*checkpoint\.$"):
        fit(trainer, tmp_path, {})
    assert_same(before, copied(trainer.state))
    saved = checkpoints.load(checkpoints.files(tmp_path / "checkpoints")[-1])
    assert saved.step == 3
    assert_same(before, copied(saved.trees))


def interrupt(batch):
    raise KeyboardInterrupt


def test_an_interrupt_saves_first(setup, tmp_path):
    trainer = make_trainer(setup)
    trainer.batches = Replaced(trainer.batches, 4, interrupt)
    with pytest.raises(KeyboardInterrupt):
        fit(trainer, tmp_path, {})
    saved = checkpoints.load(checkpoints.files(tmp_path / "checkpoints")[-1])
    assert saved.step == 4
    assert_same(copied(trainer.state), copied(saved.trees))


@pytest.mark.parametrize("name", ["apply_gradients", "apply_single"])
def test_an_interrupt_in_the_optimizer_leaves_the_state_before_it(name, setup, monkeypatch):
    trainer = make_trainer(setup, replace(SCHEDULE, average=0.9))
    for _ in range(2):
        trainer.step()
    before, original, calls = copied(trainer.state), getattr(trainer.optimizer, name), []

    def interrupted(*arrays):
        found = original(*arrays)
        calls.append(1)
        if len(calls) == (1 if name == "apply_gradients" else 3):
            raise KeyboardInterrupt
        return found

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(trainer.optimizer, name, interrupted)
        trainer.step()
    assert trainer.done == 2
    assert_same(before, copied(trainer.state))


def test_the_log_ends_where_the_run_goes_on(setup, tmp_path):
    """Steps that were logged but not saved are trained, and logged, again."""
    log = tmp_path / "log.jsonl"
    log.write_text(
        "".join(json.dumps({"step": step, "loss": 9.0}) + "\n" for step in (5, 10, 15)) + '{"st'
    )
    trainer = make_trainer(setup)
    for _ in range(12):
        trainer.step()
    fit(trainer, tmp_path, {}, steps_per_report=5)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["step"] for line in lines] == [5, 10, 15, 20]
    assert [line["loss"] == 9.0 for line in lines] == [True, True, False, False]


def test_an_interrupt_of_an_update_loses_and_repeats_nothing(setup, tmp_path, monkeypatch):
    """What is saved is of the step that the file says."""
    straight, trainer = make_trainer(setup), make_trainer(setup)
    evaluate, calls = mx.eval, []

    def interrupted(*arrays):
        evaluate(*arrays)
        calls.append(arrays)
        if len(calls) == 6:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(mx, "eval", interrupted)
        fit(trainer, tmp_path, {})
    # The update is what a step evaluates last.
    assert calls[-1][0].keys() == trainer.state.keys()
    saved = checkpoints.load(checkpoints.files(tmp_path / "checkpoints")[-1])
    for _ in range(saved.step):
        straight.step()
    assert_same(copied(straight.state), copied(saved.trees))


def test_bfloat16_is_what_is_computed_in_and_not_what_is_kept(setup):
    trainer, exact = make_trainer(setup, replace(SCHEDULE, dtype="bfloat16")), make_trainer(setup)
    losses = [trainer.step()["loss"] for _ in range(3)]
    expected = [exact.step()["loss"] for _ in range(3)]
    assert losses != expected and losses == pytest.approx(expected, rel=0.01)
    assert {value.dtype for _, value in tree_flatten(trainer.weights)} == {mx.float32}
    fc = trainer.weights["fc"]["weight"]
    assert mx.mean(fc != fc.astype(mx.bfloat16)).item() > 0.9
    load_weights(trainer)
    assert_same(copied(trainer.weights), copied(trainer.drafter.parameters()))


def test_what_is_frozen_is_computed_in_bfloat16_too(setup, monkeypatch):
    trainer = make_trainer(setup, replace(SCHEDULE, dtype="bfloat16"), only=("conv", "selector"))
    hidden, original = [], Objective._hidden
    monkeypatch.setattr(
        Objective, "_hidden", lambda *args: hidden.append(original(*args)) or hidden[-1]
    )
    trainer.step()
    assert {rows.dtype for rows in hidden} == {mx.bfloat16}


@pytest.mark.parametrize("only", [("conv", "selector"), ("backbone",)], ids=str)
def test_only_the_parts_asked_for_change(only, setup):
    trainer = make_trainer(setup, only=only)
    before = copied(trainer.drafter.parameters())
    for _ in range(4):
        trainer.step()
    load_weights(trainer)
    after = copied(trainer.drafter.parameters())
    changed = {name for name, value in before.items() if not np.array_equal(value, after[name])}
    assert changed == {name for name in before if part_of(name) in only}


def test_the_average_follows_the_weights(setup):
    trainer = make_trainer(setup, replace(SCHEDULE, average=0.5))
    expected = copied(trainer.weights)
    for step in range(4):
        trainer.step()
        decay = min(0.5, (step + 1) / (step + 10))
        now = copied(trainer.weights)
        expected = {name: decay * a + (1 - decay) * now[name] for name, a in expected.items()}
    for name, value in copied(trainer.average).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-7)


class Repeated:
    """Batches that are all the first one."""

    def __init__(self, batches: Batches):
        self.batches = batches

    def batch(self, number: int):
        return self.batches.batch(0)


def test_accumulated_batches_are_averaged(setup):
    """Two that are the same are as one."""
    results = []
    for accumulate in (1, 2):
        trainer = make_trainer(setup, replace(SCHEDULE, grad_accumulation_steps=accumulate))
        trainer.batches = Repeated(trainer.batches)
        results.append(trainer.step())
    for name in ("loss", "norm"):
        assert results[1][name] == pytest.approx(results[0][name], rel=1e-5)
    counts = [result["counts"]["rows"] for result in results]
    assert (2 * counts[0]).tolist() == counts[1].tolist()


@pytest.mark.parametrize("sample, different", [(0, 1), (60, 4)], ids=["full", "sampled"])
def test_each_batch_draws_a_sample_of_its_own(sample, different, setup):
    trainer = make_trainer(setup, replace(SCHEDULE, learning_rate=0.0), sample=sample)
    trainer.batches = Repeated(trainer.batches)
    assert len({trainer.step()["loss"] for _ in range(4)}) == different


def test_processes_take_different_batches(setup, monkeypatch):
    """In each step the next ones, a run of them each."""
    monkeypatch.setattr(trainer_module, "average_gradients", lambda gradients, group: gradients)
    asked = {}
    for rank in (0, 1):
        trainer = make_trainer(setup, replace(SCHEDULE, grad_accumulation_steps=2))
        trainer.group = SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: 2)
        batch, asked[rank] = trainer.batches.batch, []
        monkeypatch.setattr(
            trainer.batches, "batch", lambda n, r=rank, b=batch: asked[r].append(n) or b(n)
        )
        for _ in range(2):
            trainer.step()
    assert asked == {0: [0, 1, 4, 5], 1: [2, 3, 6, 7]}


def test_a_checkpoint_of_another_drafter_is_refused(setup):
    trainer = make_trainer(setup)
    saved = checkpoints.Saved(3, make_trainer(setup, selector=4).state, {})
    with pytest.raises(ValueError, match=r"^The checkpoint's `candidate_selector\.[^\n]*$"):
        trainer.restore(saved)
    assert trainer.done == 0
