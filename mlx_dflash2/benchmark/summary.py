"""Summarize single runs as figures of an arm on a suite."""

from collections.abc import Sequence
from statistics import mean, median
from typing import Any

from .measure import Sample

# Averaged over suites. All other figures are taken from all runs at once.
AVERAGED = (
    "acceptance_per_request", "acceptance_pooled", "decode_tps", "total_tps", "prompt_tps",
    "speedup", "total_speedup", "round_seconds", "host_reads_per_round",
)  # fmt: skip


def summarize(samples: Sequence[Sample], plain: Sequence[Sample]) -> dict[str, Any]:
    """Return the figures of one arm's runs, given plain decoding's at the same temperature.

    Rates in tokens a second are medians over the runs, and every ``…_spread`` is the lowest and
    the highest. A speed-up compares a run with the plain run of the same prompt and trial.
    """
    baseline = {(run.prompt, run.trial): run for run in plain}
    pairs = [(run, baseline.get((run.prompt, run.trial))) for run in samples]
    paired = [(run, base) for run, base in pairs if base is not None]
    rates: dict[str, list[float | None]] = {
        "decode_tps": [run.decode_tps for run in samples],
        "total_tps": [run.total_tps for run in samples],
        "prompt_tps": [run.prompt_tps for run in samples],
        "speedup": [_over(run.decode_tps, base.decode_tps) for run, base in paired],
        "total_speedup": [_over(run.total_tps, base.total_tps) for run, base in paired],
    }
    summary: dict[str, Any] = {"runs": len(samples)}
    for name, found in rates.items():
        values = [value for value in found if value]
        summary[name] = median(values) if values else None
        summary[f"{name}_spread"] = [min(values), max(values)] if values else None
    summary["memory"] = max(run.memory for run in samples)
    return summary | _drafting(samples)


def _drafting(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return acceptance per request, pooled and by position, and the cost of a round."""
    lengths, seconds = list[float](), list[float]()
    drafted, accepted = list[int](), list[int]()
    total = rounds = reads = 0
    for run in samples:
        here = run.stats["rounds"] if run.stats else run.rounds
        if not here:
            continue
        # A DFlash arm's first token comes from the prompt's pass, not from a round.
        tokens = len(run.tokens) - run.stats.get("prefills", 0)
        lengths.append(tokens / here)
        total, rounds = total + tokens, rounds + here
        seconds.append(run.decode_time / here)
        reads += run.stats.get("host_reads", 0)
        _add(drafted, run.stats.get("drafted_at", []))
        _add(accepted, run.stats.get("accepted_at", []))
    if not rounds:
        return {}
    by_position = [a / d for a, d in zip(accepted, drafted, strict=True)]
    return {
        "acceptance_per_request": mean(lengths),
        "acceptance_pooled": total / rounds,
        "acceptance_by_position": by_position,
        "round_seconds": median(seconds),
        # Each run has one more decision: the prompt's.
        "host_reads_per_round": reads / (rounds + len(lengths)) if reads else None,
    }


def _over(rate: float, base: float) -> float | None:
    return rate / base if base else None


def _add(totals: list[int], counts: Sequence[int]) -> None:
    totals.extend([0] * (len(counts) - len(totals)))
    for position, count in enumerate(counts):
        totals[position] += count


def by_suite(samples: Sequence[Sample], plain_of: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Summarize runs by suite and arm; ``plain_of`` maps labels of arms to the plain arm's."""
    suites: dict[str, list[Sample]] = {}
    for run in samples:
        suites.setdefault(run.suite, []).append(run)
    return {suite: _by_arm(runs, plain_of) for suite, runs in suites.items()}


def _by_arm(samples: Sequence[Sample], plain_of: dict[str, str]) -> dict[str, Any]:
    groups: dict[str, list[Sample]] = {}
    for run in samples:
        groups.setdefault(run.arm, []).append(run)
    return {
        label: summarize(groups[label], groups.get(plain, []))
        for label, plain in plain_of.items()
        if label in groups
    }


def mean_of(
    suites: dict[str, dict[str, Any]], samples: Sequence[Sample], plain_of: dict[str, str]
) -> dict[str, Any]:
    """Average the suites' figures; spreads, positions and memory are those of all runs."""
    overall = _by_arm(samples, plain_of)
    for label, summary in overall.items():
        for name in AVERAGED:
            found = [arms[label].get(name) for arms in suites.values() if label in arms]
            if values := [value for value in found if value is not None]:
                summary[name] = mean(values)
    return overall
