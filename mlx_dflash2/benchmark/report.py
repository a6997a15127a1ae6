"""Report the results of a benchmark as Markdown."""

from collections.abc import Callable, Sequence
from typing import Any

from ..decode.clock import PHASES

Columns = Sequence[tuple[str, Callable[[dict[str, Any]], str]]]


def number(value: float | None, digits: int = 2) -> str:
    """Format a figure; ``None`` becomes a dash."""
    return "–" if value is None else f"{value:.{digits}f}"


def with_spread(summary: dict[str, Any], name: str, unit: str = "") -> str:
    """Format a median with the lowest and the highest value."""
    value, spread = summary.get(name), summary.get(f"{name}_spread")
    if value is None or spread is None:
        return number(value)
    return f"{value:.2f}{unit} ({spread[0]:.2f}–{spread[1]:.2f})"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


COLUMNS: Columns = (
    ("acceptance length, per request", lambda s: number(s.get("acceptance_per_request"))),
    ("pooled", lambda s: number(s.get("acceptance_pooled"))),
    ("decode tokens/s", lambda s: with_spread(s, "decode_tps")),
    ("speed-up, decode", lambda s: with_spread(s, "speedup", " ×")),
    ("end to end tokens/s", lambda s: number(s.get("total_tps"))),
    ("speed-up, end to end", lambda s: with_spread(s, "total_speedup", " ×")),
    ("prefill tokens/s", lambda s: number(s.get("prompt_tps"), 1)),
    ("peak memory GB", lambda s: number(s["memory"] / 1e9)),
)


def markdown(results: dict[str, Any]) -> str:
    """Format the whole report."""
    parts = [_heading(results), _mean_table(results), _suite_table(results)]
    parts += [_positions(results), _phases(results), _parity(results)]
    parts += [recall_markdown(*item) for item in results.get("recall", {}).items()]
    return "\n\n".join(part for part in parts if part) + "\n"


def _heading(results: dict[str, Any]) -> str:
    where, settings, prompts = (results[name] for name in ("environment", "settings", "prompts"))
    models = ", ".join(f"{role} {model['name']}" for role, model in results["models"].items())
    versions = where["versions"]
    return (
        f"{models}. {where['chip']}, {where['cores']} cores, {where['memory'] / 1e9:.0f} GB, "
        f"{where['os']}, MLX {versions['mlx']} on the {where['device']}, mlx-lm "
        f"{versions['mlx-lm']}. {prompts['count']} prompts (hash {prompts['sha256']}), at most "
        f"{settings['max_tokens']} tokens each, {settings['trials']} trial(s). Rates are medians, "
        "with the lowest and the highest run in brackets."
    )


def _mean_table(results: dict[str, Any]) -> str:
    header = ["mean of the suites", *(name for name, _ in COLUMNS)]
    means = results["mean"].items()
    return table(header, [[label, *(show(mean) for _, show in COLUMNS)] for label, mean in means])


def _suite_table(results: dict[str, Any]) -> str:
    """Format acceptance length and decode speed-up: a row for each arm, a column for each suite."""
    suites = results["suites"]
    rows = []
    for label in results["mean"]:
        cells = []
        for arms in suites.values():
            summary = arms.get(label, {})
            if summary.get("acceptance_per_request") is None:
                cells.append(f"{number(summary.get('decode_tps'))} tokens/s")
            else:
                length, speed = summary["acceptance_per_request"], summary["speedup"]
                cells.append(f"{length:.2f}, {number(speed)} ×")
        rows.append([label, *cells])
    return table(["acceptance length per request, speed-up of decoding", *suites], rows)


def _positions(results: dict[str, Any]) -> str:
    rows = [
        [label, *(number(rate) for rate in summary["acceptance_by_position"])]
        for label, summary in results["mean"].items()
        if summary.get("acceptance_by_position")
    ]
    if not rows:
        return ""
    longest = max(map(len, rows))
    header = ["drafts accepted at position", *map(str, range(1, longest))]
    return table(header, [row + ["–"] * (longest - len(row)) for row in rows])


def _phases(results: dict[str, Any]) -> str:
    phases = results["phases"]
    if not phases:
        return ""
    rows = []
    for label, seconds in phases.items():
        summary = results["mean"][label]
        undisturbed = summary.get("round_seconds")
        times = [*(seconds[name] for name in PHASES), undisturbed]
        reads = number(summary.get("host_reads_per_round"))
        rows.append([label, *(number(time and time * 1e3, 1) for time in times), reads])
    header = ["ms a round", *PHASES, "undisturbed round", "host reads a round"]
    text = (
        "The phases come from a separate pass that waits for the device after each of them and "
        "so disturbs what it measures; the undisturbed round is from the ordinary runs."
    )
    return f"{table(header, rows)}\n\n{text}"


def _parity(results: dict[str, Any]) -> str:
    rows = []
    for label, found in results["parity"].items():
        verdicts = [entry["verdict"] for entry in found]
        counts = ", ".join(f"{verdicts.count(v)} {v}" for v in dict.fromkeys(verdicts))
        other = [entry for entry in found if entry["index"] is not None]
        rows.append([label, counts, "; ".join(map(_difference, other)) or "none"])
    header = ["tokens against plain mlx-lm's", "answers", "first difference"]
    return table(header, rows) if rows else ""


def _difference(entry: dict[str, Any]) -> str:
    return (
        f"prompt {entry['prompt']}, token {entry['index']}: {entry['found']} for {entry['plain']}, "
        f"top-2 gap {entry['gap']:.2g}, rounding {entry['noise']:.2g}: {entry['verdict']}"
    )


def recall_markdown(label: str, found: dict[str, Any]) -> str:
    """Format the recall table of one drafter."""
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
    return f"{table([label, *positions, 'acceptance length'], rows)}\n\n{text}"
