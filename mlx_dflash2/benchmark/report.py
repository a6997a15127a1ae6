"""Report the results of a benchmark in tables."""

from collections.abc import Callable, Sequence
from typing import Any

from ..decode.clock import PHASES
from .tables import Part, Table

# The highest rate of a single run by the lowest; more says that the machine was disturbed.
MOST_SPREAD = 2
Columns = Sequence[tuple[str, Callable[[dict[str, Any]], str]]]


def number(value: float | None, digits: int = 2) -> str:
    """Format a figure; ``None`` becomes a dash."""
    return "–" if value is None else f"{value:.{digits}f}"


def with_interval(summary: dict[str, Any], name: str, unit: str = "") -> str:
    """Format a figure with the interval around it; ``!`` marks runs that differ twofold."""
    value, interval = summary.get(name), summary.get(f"{name}_interval")
    if value is None or interval is None:
        return number(value) + (unit if value is not None else "")
    low, high = summary[f"{name}_spread"]
    mark = " !" if high > MOST_SPREAD * low else ""
    return f"{value:.2f}{unit} ({interval[0]:.2f}–{interval[1]:.2f}){mark}"


COLUMNS: Columns = (
    ("runs", lambda s: str(s["runs"])),
    ("acceptance length", lambda s: with_interval(s, "acceptance_pooled")),
    ("per request", lambda s: number(s["acceptance_per_request"])),
    ("decode tokens/s", lambda s: with_interval(s, "decode_tps")),
    ("speed-up, decode", lambda s: with_interval(s, "speedup", " ×")),
    ("end to end tokens/s", lambda s: with_interval(s, "total_tps")),
    ("speed-up, end to end", lambda s: with_interval(s, "total_speedup", " ×")),
    ("prefill tokens/s", lambda s: number(s["prompt_tps"], 1)),
    ("peak memory GB", lambda s: number(s["memory"] / 1e9)),
)


def report(results: dict[str, Any]) -> list[Part]:
    """Return the tables and paragraphs of the whole report."""
    parts: list[Part] = [
        _heading(results),
        _overall(results),
        _spread(results),
        _suite_table(results),
    ]
    parts += [*_positions(results), *_phases(results), *_parity(results)]
    for item in results.get("recall", {}).items():
        parts += recall_parts(*item)
    return [part for part in parts if part]


def _heading(results: dict[str, Any]) -> str:
    where, settings, prompts = (results[name] for name in ("environment", "settings", "prompts"))
    models = ", ".join(f"{role} {model['name']}" for role, model in results["models"].items())
    versions = where["versions"]
    return (
        f"{models}. {where['chip']}, {where['cores']} cores, {where['memory'] / 1e9:.0f} GB, "
        f"{where['os']}, MLX {versions['mlx']} on the {where['device']}, mlx-lm "
        f"{versions['mlx-lm']}. {prompts['count']} prompts (hash {prompts['sha256']}), at most "
        f"{settings['max_tokens']} tokens each, {settings['trials']} trial(s). Rates are all "
        "tokens by all seconds; in brackets is where 95 % of the figures of resampled runs lie."
        + ("" if results["complete"] else f" INTERRUPTED: {len(results['samples'])} runs only.")
    )


def _overall(results: dict[str, Any]) -> Table:
    header = ["all suites", *(name for name, _ in COLUMNS)]
    arms = results["overall"].items()
    return Table(header, [[label, *(show(arm) for _, show in COLUMNS)] for label, arm in arms])


def _spread(results: dict[str, Any]) -> str:
    arms = results["overall"].values()
    rows = [with_interval(arm, name) for arm in arms for name in ("decode_tps", "speedup")]
    if not any(row.endswith("!") for row in rows):
        return ""
    return "! Single runs differ more than twofold: was the machine busy, or are prompts unlike?"


def _suite_table(results: dict[str, Any]) -> Table:
    """Format acceptance length and decode speed-up: a row for each arm, a column for each suite."""
    suites = results["suites"]
    rows = []
    for label in results["overall"]:
        cells = []
        for arms in suites.values():
            summary = arms.get(label, {})
            if summary.get("acceptance_pooled") is None:
                cells.append(f"{number(summary.get('decode_tps'))} tokens/s")
            else:
                length, speed = summary["acceptance_pooled"], summary["speedup"]
                cells.append(f"{length:.2f}, {number(speed)} ×")
        rows.append([label, *cells])
    return Table(["acceptance length, speed-up of decoding", *suites], rows)


def _positions(results: dict[str, Any]) -> list[Part]:
    rows = [
        [label, *(number(rate) for rate in summary["acceptance_by_position"])]
        for label, summary in results["overall"].items()
        if summary.get("acceptance_by_position")
    ]
    if not rows:
        return []
    longest = max(map(len, rows))
    header = ["drafts accepted at position", *map(str, range(1, longest))]
    return [Table(header, [row + ["–"] * (longest - len(row)) for row in rows])]


def _phases(results: dict[str, Any]) -> list[Part]:
    phases = results["phases"]
    if not phases:
        return []
    rows = []
    for label, seconds in phases.items():
        summary = results["overall"][label]
        undisturbed = summary.get("round_seconds")
        times = [*(seconds[name] for name in PHASES), undisturbed]
        reads = number(summary.get("host_reads_per_round"))
        rows.append([label, *(number(time and time * 1e3, 1) for time in times), reads])
    header = ["ms a round", *PHASES, "undisturbed round", "host reads a round"]
    text = (
        "The phases come from a separate pass that waits for the device after each of them and "
        "so disturbs what it measures; the undisturbed round is from the ordinary runs."
    )
    return [Table(header, rows), text]


def _parity(results: dict[str, Any]) -> list[Part]:
    rows = []
    for label, found in results["parity"].items():
        verdicts = [entry["verdict"] for entry in found]
        counts = ", ".join(f"{verdicts.count(v)} {v}" for v in dict.fromkeys(verdicts))
        other = [entry for entry in found if entry["index"] is not None]
        rows.append([label, counts, "; ".join(map(_difference, other)) or "none"])
    header = ["tokens against plain mlx-lm's", "answers", "first difference"]
    return [Table(header, rows)] if rows else []


def _difference(entry: dict[str, Any]) -> str:
    return (
        f"prompt {entry['prompt']}, token {entry['index']}: {entry['found']} for {entry['plain']}, "
        f"top-2 gap {entry['gap']:.2g}, rounding {entry['noise']:.2g}: {entry['verdict']}"
    )


def recall_parts(label: str, found: dict[str, Any]) -> list[Part]:
    """Return the recall table of one drafter, and what it says."""
    columns = {
        "Recall@1": ("recall_best", "acceptance_best"),
        f"Recall@{found['candidates']} (oracle)": ("recall_candidates", "acceptance_oracle"),
        "selector, of true candidates": ("selector_accuracy", "acceptance_path"),
    }
    rows = [
        [name, *map(number, [*found[rates], found[length]])]
        for name, (rates, length) in columns.items()
        if found[rates]
    ]
    positions = map(str, range(1, len(found["recall_best"]) + 1))
    text = (
        f"Teacher forced at {found['anchors']} anchors of the target's own text. Recall is taken "
        "where all earlier rows are right. The lengths are means over evenly spaced anchors, which "
        "are easier than those of decoding: compare them with one another only."
    )
    return [Table([label, *positions, "acceptance length"], rows), text]
