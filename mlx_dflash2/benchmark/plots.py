"""Plot the results of a benchmark."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..decode.clock import PHASES
from ..evaluation.plots import line_plot, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check() -> None:
    """Check that plots can be made, before anything is measured.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    new_figure()


def save(results: dict[str, Any], folder: Path) -> list[Path]:
    """Write every plot that the results have figures for, and return the files."""
    figures = {
        "acceptance_by_position": _positions(results["overall"]),
        "speedup": _speedups(results["overall"]),
        "round_time": _round_times(results["phases"]),
    }
    for label, found in results.get("recall", {}).items():
        name = "".join(c if c.isalnum() else "_" for c in label)
        figures[f"recall_{name}"] = _recall(label, found)
    return [save_figure(f, folder / f"{name}.png") for name, f in figures.items() if f is not None]


def _positions(overall: dict[str, Any]) -> "Figure | None":
    name = "acceptance_by_position"
    lines = {
        f"{label}, {summary['drafted_at'][0]} rounds": summary[name]
        for label, summary in overall.items()
        if summary.get(name)
    }
    return line_plot("Drafts accepted, by position", lines, "share of drafts") if lines else None


def _speedups(overall: dict[str, Any]) -> "Figure | None":
    arms = {
        label: summary
        for label, summary in overall.items()
        if summary.get("speedup") and summary.get("acceptance_pooled")
    }
    if not arms:
        return None
    figure = new_figure()
    axes = figure.subplots()
    values = [summary["speedup"] for summary in arms.values()]
    # A single run has no interval.
    intervals = [s["speedup_interval"] or [s["speedup"]] * 2 for s in arms.values()]
    errors = [
        [max(0, value - low) for value, (low, _) in zip(values, intervals, strict=True)],
        [max(0, high - value) for value, (_, high) in zip(values, intervals, strict=True)],
    ]
    names = [f"{label}\n{summary['runs']} runs" for label, summary in arms.items()]
    bars = axes.barh(names, values, xerr=errors, capsize=3)
    axes.bar_label(bars, [f"{v:.2f}" for v in values], label_type="center", color="white")
    axes.axvline(1, color="black", linewidth=1, label="plain mlx-lm")
    axes.legend()
    axes.invert_yaxis()
    axes.set_xlabel("times the decoding speed of plain mlx-lm")
    axes.set_title("Speed-up of all runs, with 95 % intervals")
    return figure


def _round_times(phases: dict[str, Any]) -> "Figure | None":
    if not phases:
        return None
    figure = new_figure()
    axes = figure.subplots()
    starts = [0.0] * len(phases)
    for name in PHASES:
        widths = [seconds[name] * 1e3 for seconds in phases.values()]
        bars = axes.barh(list(phases), widths, left=starts, label=name)
        axes.bar_label(bars, [f"{width:.1f}" for width in widths], label_type="center")
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="ms a round, waiting for each phase", title="Time of a round")
    figure.legend(loc="outside lower center", ncols=len(PHASES))
    return figure


def _recall(label: str, found: dict[str, Any]) -> "Figure":
    lines = {
        "Recall@1": found["recall_best"],
        f"Recall@{found['candidates']}": found["recall_candidates"],
    }
    if found["selector_accuracy"]:
        lines["selector, of true candidates"] = found["selector_accuracy"]
    nan = float("nan")
    lines = {k: [nan if value is None else value for value in v] for k, v in lines.items()}
    return line_plot(f"Headroom of {label}", lines, "teacher forced")
