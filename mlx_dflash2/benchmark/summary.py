"""Summarize single runs as figures of an arm, each with how many runs it is of."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .measure import Sample

# The share of resampled figures that an interval covers, and how many are drawn.
COVERAGE, RESAMPLES = 95, 1000
# Two numbers of a run whose sums over all runs are divided.
Parts = Callable[[Sample], tuple[float, float]]
RATES: dict[str, Parts] = {
    "decode_tps": lambda run: (len(run.tokens) - 1, run.decode_time),
    "total_tps": lambda run: (len(run.tokens), run.total_time),
    "prompt_tps": lambda run: (run.prompt_tokens, run.prompt_time),
    "acceptance_pooled": lambda run: (_round_tokens(run), _rounds(run)),
    "round_seconds": lambda run: (run.decode_time, _rounds(run)),
}
SPEEDUPS = {"speedup": "decode_tps", "total_speedup": "total_tps"}


def summarize(samples: Sequence[Sample], plain: Sequence[Sample]) -> dict[str, Any]:
    """Return the figures of one arm's runs, given plain decoding's at the same temperature.

    Each rate is a ratio of totals: all tokens by all seconds. A speed-up is the ratio of two such
    rates, over the runs of the same prompts and trials. ``…_interval`` is where 95 % of the
    figures of resampled runs lie (bootstrap), and ``…_spread`` the lowest and the highest figure
    of a single run; both are ``None`` for a single run.
    """
    baseline = {(run.prompt, run.trial): run for run in plain}
    paired = [run for run in samples if (run.prompt, run.trial) in baseline]
    base = [baseline[run.prompt, run.trial] for run in paired]
    summary: dict[str, Any] = {"runs": len(samples)}
    for name, parts in RATES.items():
        summary |= _figure(name, _columns(samples, parts))
    for name, rate in SPEEDUPS.items():
        columns = _columns(paired, RATES[rate]), _columns(base, RATES[rate])
        summary |= _figure(name, np.concatenate(columns))
    summary["memory"] = max(run.memory for run in samples)
    return summary | _drafting(samples)


def _rounds(run: Sample) -> int:
    rounds: int = run.stats["rounds"] if run.stats else run.rounds
    return rounds


def _round_tokens(run: Sample) -> int:
    # A DFlash arm's first token comes from the prompt's pass, not from a round.
    return len(run.tokens) - run.stats.get("prefills", 0) if _rounds(run) else 0


def _columns(samples: Sequence[Sample], parts: Parts) -> np.ndarray:
    return np.array([parts(run) for run in samples], float).reshape(-1, 2).T


def _figure(name: str, columns: np.ndarray) -> dict[str, Any]:
    """Divide sums of columns [2 or 4, runs]: first by second, and that by third by fourth."""
    # A run without rounds, or without time, says nothing.
    columns = columns[:, (columns > 0).all(axis=0)]
    count = columns.shape[1]
    if count == 0:
        return {name: None, f"{name}_interval": None, f"{name}_spread": None}
    figure: dict[str, Any] = {name: float(_ratio(columns.sum(axis=1))), f"{name}_interval": None}
    if count > 1:
        picks = np.random.default_rng(0).integers(0, count, (RESAMPLES, count))
        drawn = _ratio(columns[:, picks].sum(axis=2))
        edge = (100 - COVERAGE) / 2
        figure[f"{name}_interval"] = np.percentile(drawn, [edge, 100 - edge]).tolist()
    single = _ratio(columns)
    figure[f"{name}_spread"] = [float(single.min()), float(single.max())] if count > 1 else None
    return figure


def _ratio(sums: np.ndarray) -> np.ndarray:
    ratio: np.ndarray = sums[0] / sums[1]
    return ratio if len(sums) == 2 else ratio * sums[3] / sums[2]


def _drafting(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return acceptance per request and by position, and the host's reads."""
    drafted, accepted = list[int](), list[int]()
    with_rounds = [run for run in samples if _rounds(run)]
    if not with_rounds:
        return {"acceptance_per_request": None}
    for run in with_rounds:
        _add(drafted, run.stats.get("drafted_at", []))
        _add(accepted, run.stats.get("accepted_at", []))
    lengths = [_round_tokens(run) / _rounds(run) for run in with_rounds]
    reads = sum(run.stats.get("host_reads", 0) for run in with_rounds)
    # Each run has one more decision: the prompt's.
    decisions = sum(map(_rounds, with_rounds)) + len(with_rounds)
    return {
        "acceptance_per_request": float(np.mean(lengths)),
        "acceptance_by_position": [a / d for a, d in zip(accepted, drafted, strict=True)],
        "drafted_at": drafted,
        "host_reads_per_round": reads / decisions if reads else None,
    }


def _add(totals: list[int], counts: Sequence[int]) -> None:
    totals.extend([0] * (len(counts) - len(totals)))
    for position, count in enumerate(counts):
        totals[position] += count


def by_suite(samples: Sequence[Sample], plain_of: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Summarize runs by suite and arm; ``plain_of`` maps labels of arms to the plain arm's."""
    suites: dict[str, list[Sample]] = {}
    for run in samples:
        suites.setdefault(run.suite, []).append(run)
    return {suite: by_arm(runs, plain_of) for suite, runs in suites.items()}


def by_arm(samples: Sequence[Sample], plain_of: dict[str, str]) -> dict[str, Any]:
    """Summarize runs by arm."""
    groups: dict[str, list[Sample]] = {}
    for run in samples:
        groups.setdefault(run.arm, []).append(run)
    return {
        label: summarize(groups[label], groups.get(plain, []))
        for label, plain in plain_of.items()
        if label in groups
    }
