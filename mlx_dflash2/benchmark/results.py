"""The parts of a benchmark's results: figures of the runs, parity, phases and recall."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from ..checkpoint.files import resolve
from ..checkpoint.load import UNQUANTIZED, DrafterSource, device_dtype, load_drafter, read_drafter
from ..cli.dense import FLAG, unpack
from ..drafter.model import Drafter
from ..drafter.variants import without_selector
from ..evaluation.machine import fingerprint
from ..evaluation.parity import compare_tokens
from ..evaluation.recall import recall_table
from ..pairs.find import PairSources
from ..pairs.known import model_name
from .arms import PLAIN, Arm, lacks_selector
from .measure import Bench, Sample
from .phases import time_phases
from .summary import by_arm, by_suite


def prepare_drafters(
    drafter: Drafter,
    source: DrafterSource,
    bits: Sequence[int] = (),
    dflash1_model: str | None = None,
    no_selector: bool = False,
    dense: bool = False,
) -> dict[str, Drafter]:
    """Make the drafters to compare, by the name of their arm.

    Args:
        drafter (Drafter): The pair's own, as it is stored.
        source (DrafterSource): Where it came from.
        bits, dflash1_model, no_selector, dense: Options of the command, for further drafters.

    Raises:
        ValueError: if there is no selector to leave out.
    """
    name, dtype = f"DFlash {drafter.args.generation}", device_dtype()
    drafters = {name: drafter}
    for number in bits:
        drafters[f"{name} {number}-bit"] = read_drafter(source, bits=number, dtype=dtype)
    if dflash1_model is not None:
        other = "other DFlash 1" if name == "DFlash 1" else "DFlash 1"
        drafters[other] = load_drafter(dflash1_model, bits=UNQUANTIZED, dtype=dtype, lazy=dense)
        if dense:
            unpack(drafters[other], flag=f"{FLAG}, --dflash1-model")
    if no_selector:
        if not drafter.args.has_selector:
            raise ValueError("--no-selector: this drafter has no selector to leave out.")
        drafters[f"{name} without selector"] = without_selector(drafter)
    return drafters


def models_of(
    sources: PairSources, dflash1_model: str | None, draft_lm: str | None
) -> dict[str, Any]:
    """Return name and fingerprint of every model in use."""
    pair = {"target": sources.target, "drafter": sources.drafter}
    found = {role: (source.name, source.folder) for role, source in pair.items()}
    for role, path in (("DFlash 1", dflash1_model), ("draft model", draft_lm)):
        if path is not None:
            found[role] = path, resolve(path)
    return {
        role: {"name": model_name(name), "fingerprint": fingerprint(folder)}
        for role, (name, folder) in found.items()
    }


def figures(bench: Bench, samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the figures of the runs so far, by suite and of all."""
    plain_of = {arm.label: _plain(bench.arms, arm).label for arm in bench.arms}
    return {
        "complete": False,
        "suites": by_suite(samples, plain_of),
        "overall": by_arm(samples, plain_of),
        "parity": {},
        "phases": {},
        "recall": {},
        "samples": [asdict(sample) for sample in samples],
    }


def audits(
    bench: Bench,
    samples: Sequence[Sample],
    recall_stride: int | None,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Return what is measured once all runs are done: parity, phases and recall.

    Without ``recall_stride``, tokens from one anchor to the next on the greedy plain answers,
    there is no recall table. ``progress`` is called with a description before each step.
    """
    return {
        "complete": True,
        "parity": _parity(bench, samples, progress),
        "phases": _phases(bench, progress),
        "recall": {} if recall_stride is None else _recall(bench, samples, recall_stride, progress),
    }


def _plain(arms: Sequence[Arm], arm: Arm) -> Arm:
    return next(a for a in arms if a.is_plain and a.temperature == arm.temperature)


def _parity(
    bench: Bench, samples: Sequence[Sample], progress: Callable[[str], None]
) -> dict[str, list[dict[str, Any]]]:
    """Compare every greedy answer of the first trial with plain decoding's."""
    first = {(run.arm, run.prompt): run for run in samples if run.trial == 0}
    verdicts: dict[str, list[dict[str, Any]]] = {}
    for arm in bench.arms:
        if arm.is_plain or arm.temperature > 0:
            continue
        progress(f"parity, {arm.label}")
        plain = _plain(bench.arms, arm).label
        for index, prompt in enumerate(bench.prompts):
            expected, found = (first[label, index].tokens for label in (plain, arm.label))
            verdict = compare_tokens(bench.model, prompt.tokens, expected, found, arm.rows)
            verdicts.setdefault(arm.label, []).append({"prompt": index} | asdict(verdict))
    return verdicts


def _phases(bench: Bench, progress: Callable[[str], None]) -> dict[str, dict[str, float]]:
    prompt = bench.prompts[0].tokens
    phases = {}
    for arm in bench.arms:
        # The temperature changes the number of rounds, not their phases.
        proposer = arm.proposer
        if proposer is not None and arm.temperature == bench.arms[0].temperature:
            progress(f"phases, {arm.label}")
            phases[arm.label] = time_phases(bench.model, arm, proposer, prompt, bench.settings)
    return phases


def _recall(
    bench: Bench, samples: Sequence[Sample], stride: int, progress: Callable[[str], None]
) -> dict[str, Any]:
    greedy = [run for run in samples if run.arm == PLAIN and run.trial == 0]
    texts = [(bench.prompts[run.prompt].tokens, run.tokens) for run in greedy]
    # Without a selector, the rows are the same as with it.
    drafters = {name: d for name, d in bench.drafters.items() if not lacks_selector(d)}
    tables = {}
    for name, drafter in drafters.items():
        if all(len(answer) < drafter.block_size for _, answer in texts):
            warnings.warn(
                f"No recall of {name}: every answer is shorter than a block.", stacklevel=2
            )
            continue
        tables[name] = recall_table(bench.model, drafter, texts, stride, progress)
    return tables
