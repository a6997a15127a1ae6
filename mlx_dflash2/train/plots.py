"""Pictures of a training run."""

import json
from pathlib import Path
from typing import Any

from ..evaluation.plots import line_plot, new_figure


def save_all(found: dict[str, Any], folder: Path) -> list[Path]:
    """What an evaluation found, and the run's log if it has one.

    Raises:
        ImportError: if the package that draws is not installed.
    """
    files = [save_evaluation(found, folder)]
    log = folder / "log.jsonl"
    if log.is_file():
        lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
        files.append(save_log(lines, folder))
    return files


def save_log(log: list[dict[str, Any]], folder: Path) -> Path:
    """Loss and acceptance length by step, in ``training.png``."""
    figure = new_figure()
    left = figure.subplots()
    steps = [line["step"] for line in log]
    left.plot(steps, [line["loss"] for line in log], color="tab:blue")
    left.set(xlabel="step", ylabel="loss", title="Training")
    right = left.twinx()
    right.plot(steps, [line["length"] for line in log], color="tab:orange")
    right.set(ylabel="acceptance length at the drawn anchors")
    return _save(figure, folder / "training.png")


def save_evaluation(found: dict[str, Any], folder: Path) -> Path:
    """Acceptance and recall by position, in ``acceptance.png``."""
    curves = {
        f"accepted, temperature {temp}": result["by_position"]
        for temp, result in found["decoding"].items()
    }
    recall = found["recall"]
    if recall is not None:
        curves["best token right, where all before are"] = recall["recall_best"]
        curves["among the candidates, where all before are"] = recall["recall_candidates"]
    figure = line_plot("Held-out prompts", curves, "share of drafts")
    return _save(figure, folder / "acceptance.png")


def _save(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path
