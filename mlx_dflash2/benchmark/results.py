"""A whole benchmark: the runs, their figures, parity, phases and recall, as one JSON object."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..checkpoint.files import resolve
from ..checkpoint.load import load_drafter
from ..drafter.model import Drafter
from ..drafter.variants import without_selector
from ..evaluation.machine import environment, fingerprint
from ..evaluation.parity import compare_tokens
from ..evaluation.recall import recall_table
from ..pairs.known import model_name
from ..pairs.load import pair_paths
from .arms import Arm, lacks_selector
from .compare import FORMAT, KIND
from .measure import Bench, Sample
from .phases import time_phases
from .summary import by_suite, mean_of


def prepare_drafters(
    drafter: Drafter,
    path: str | Path,
    bits: Sequence[int] = (),
    dflash1_model: str | None = None,
    no_selector: bool = False,
) -> dict[str, Drafter]:
    """The drafters by the name of their arm.

    Args:
        drafter (Drafter): As it is stored.
        path (str or Path): Where it came from.
        bits (sequence of int): Quantisations at load, a drafter each.
        dflash1_model (str, optional): Another drafter of the same target.
        no_selector (bool): Also the first one without its selector.

    Raises:
        ValueError: if there is no selector to leave out.
    """
    name = f"DFlash {drafter.args.generation}"
    dtype = mx.float32 if mx.default_device() == mx.cpu else None
    drafters = {name: drafter}
    for number in bits:
        drafters[f"{name} {number}-bit"] = load_drafter(path, bits=number, dtype=dtype)
    if dflash1_model is not None:
        other = "other DFlash 1" if name == "DFlash 1" else "DFlash 1"
        drafters[other] = load_drafter(dflash1_model, dtype=dtype)
    if no_selector:
        if not drafter.args.has_selector:
            raise ValueError("--no-selector: this drafter has no selector to leave out.")
        drafters[f"{name} without selector"] = without_selector(drafter)
    return drafters


def models_of(
    model: str | None, draft_model: str | None, dflash1_model: str | None, draft_lm: str | None
) -> dict[str, Any]:
    """Name and fingerprint of every model in use."""
    paths = dict(zip(("target", "drafter"), pair_paths(model, draft_model), strict=True))
    paths |= {"DFlash 1": dflash1_model, "draft model": draft_lm}
    return {
        role: {"name": model_name(path), "fingerprint": fingerprint(resolve(path))}
        for role, path in paths.items()
        if path is not None
    }


def measure_all(
    bench: Bench, recall_stride: int | None, progress: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Run everything.

    Args:
        bench (Bench): What to run.
        recall_stride (int, optional): Tokens of the greedy plain answers from one anchor of the
          recall table to the next; ``None`` for no table.
        progress (callable): Called with a description before each step.
    """
    samples = bench.run(progress)
    plain_of = {arm.label: _plain(bench.arms, arm).label for arm in bench.arms}
    suites = by_suite(samples, plain_of)
    results = {
        "kind": KIND,
        "format": FORMAT,
        "environment": environment(),
        "suites": suites,
        "mean": mean_of(suites, samples, plain_of),
        "parity": _parity(bench, samples, progress),
        "phases": _phases(bench, progress),
        "recall": {} if recall_stride is None else _recall(bench, samples, recall_stride, progress),
        "samples": [asdict(sample) for sample in samples],
    }
    return results


def _plain(arms: Sequence[Arm], arm: Arm) -> Arm:
    return next(a for a in arms if a.is_plain and a.temperature == arm.temperature)


def _parity(
    bench: Bench, samples: Sequence[Sample], progress: Callable[[str], None]
) -> dict[str, list[dict[str, Any]]]:
    """The verdict on every greedy answer of the first trial."""
    first = {(run.arm, run.prompt): run for run in samples if run.trial == 0}
    verdicts: dict[str, list[dict[str, Any]]] = {}
    for arm in bench.arms:
        if arm.is_plain or arm.temperature > 0:
            continue
        progress(f"parity, {arm.label}")
        plain = _plain(bench.arms, arm).label
        for index, prompt in enumerate(bench.prompts):
            tokens = [first[label, index].tokens for label in (plain, arm.label)]
            verdict = compare_tokens(bench.model, prompt.tokens, *tokens, arm.rows)
            verdicts.setdefault(arm.label, []).append({"prompt": index} | asdict(verdict))
    return verdicts


def _phases(bench: Bench, progress: Callable[[str], None]) -> dict[str, dict[str, float]]:
    prompt = bench.prompts[0].tokens
    phases = {}
    for arm in bench.arms:
        # A higher temperature only changes how many rounds there are.
        if arm.proposer is not None and arm.temperature == bench.arms[0].temperature:
            progress(f"phases, {arm.label}")
            phases[arm.label] = time_phases(bench.model, arm, prompt, bench.settings)
    return phases


def _recall(
    bench: Bench, samples: Sequence[Sample], stride: int, progress: Callable[[str], None]
) -> dict[str, Any]:
    greedy = next(arm for arm in bench.arms if arm.is_plain and arm.temperature == 0)
    texts = [
        (bench.prompts[run.prompt].tokens, run.tokens)
        for run in samples
        if run.arm == greedy.label and run.trial == 0
    ]
    # Its rows are those of the same drafter with the selector.
    drafters = {name: d for name, d in bench.drafters.items() if not lacks_selector(d)}
    tables = {}
    for name, drafter in drafters.items():
        if all(len(answer) < drafter.block_size for _, answer in texts):
            text = f"No recall of {name}: every answer is shorter than a block."
            warnings.warn(text, stacklevel=2)
            continue
        tables[name] = recall_table(bench.model, drafter, texts, stride, progress)
    return tables
