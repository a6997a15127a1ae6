"""The results of a benchmark as pictures."""

from pathlib import Path
from typing import Any

from ..decode.clock import PHASES
from ..evaluation.plots import line_plot, new_figure


def check():
    """Refuse early, before anything is measured.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    new_figure()


def save(results: dict[str, Any], folder: Path) -> list[Path]:
    """Write every picture that the results have figures for.

    Args:
        results (dict): From the command.
        folder (Path): Made if it is not there.

    Returns:
        list: The files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    figures = {
        "acceptance_by_position": _positions(results["mean"]),
        "speedup": _speedups(results["mean"]),
        "round_time": _round_times(results["phases"]),
    }
    for label, found in results.get("recall", {}).items():
        name = "".join(c if c.isalnum() else "_" for c in label)
        figures[f"recall_{name}"] = _recall(label, found)
    written = []
    for name, figure in figures.items():
        if figure is not None:
            written.append(folder / f"{name}.png")
            figure.savefig(written[-1])
    return written


def _positions(mean: dict[str, Any]):
    lines = {
        label: summary["acceptance_by_position"]
        for label, summary in mean.items()
        if summary.get("acceptance_by_position")
    }
    return line_plot("Drafts accepted, by position", lines, "share of drafts") if lines else None


def _speedups(mean: dict[str, Any]):
    arms = {
        label: summary
        for label, summary in mean.items()
        if summary.get("speedup") and summary.get("acceptance_pooled")
    }
    if not arms:
        return None
    figure = new_figure()
    axes = figure.subplots()
    values = [summary["speedup"] for summary in arms.values()]
    spreads = [summary["speedup_spread"] for summary in arms.values()]
    errors = [
        [max(0, value - spread[0]) for value, spread in zip(values, spreads, strict=True)],
        [max(0, spread[1] - value) for value, spread in zip(values, spreads, strict=True)],
    ]
    axes.barh(list(arms), values, xerr=errors, capsize=3)
    axes.axvline(1, color="black", linewidth=1)
    axes.invert_yaxis()
    axes.set(
        xlabel="times the decoding speed of plain mlx-lm",
        title="Speed-up, from the lowest to the highest run",
    )
    return figure


def _round_times(phases: dict[str, Any]):
    if not phases:
        return None
    figure = new_figure()
    axes = figure.subplots()
    starts = [0.0] * len(phases)
    for name in PHASES:
        widths = [seconds[name] * 1e3 for seconds in phases.values()]
        axes.barh(list(phases), widths, left=starts, label=name)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="ms a round, waiting for each phase", title="Time of a round")
    figure.legend(loc="outside lower center", ncols=len(PHASES))
    return figure


def _recall(label: str, found: dict[str, Any]):
    lines = {
        "Recall@1": found["recall_best"],
        f"Recall@{found['candidates']}": found["recall_candidates"],
    }
    if found["selector_accuracy"]:
        lines["selector, of true candidates"] = found["selector_accuracy"]
    lines = {
        name: [float("nan") if value is None else value for value in values]
        for name, values in lines.items()
    }
    return line_plot(f"Headroom of {label}", lines, "teacher forced")
