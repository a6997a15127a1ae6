"""The log of a training run: a JSON line for the steps of each report."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx.utils import tree_map

if TYPE_CHECKING:
    from .trainer import Trainer


class StepTotals:
    """Sums over the steps since the last report."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.counts: dict[str, mx.array] = {}
        self.began = time.monotonic()

    def add(self, result: dict[str, Any]) -> None:
        """Add what :meth:`Trainer.step` returned."""
        self.losses.append(result["loss"])
        self.norms.append(result["norm"])
        counts = result["counts"]
        self.counts = tree_map(mx.add, self.counts, counts) if self.counts else counts

    def line(self, trainer: "Trainer") -> dict[str, Any]:
        """Return a line of the log.

        Shares are of all rows of a position, right or wrong before it. ``length`` is the
        acceptance length over the drawn anchors. Decoding's is shorter: it visits hard places
        more often.

        Args:
            trainer (Trainer): After the last of these steps.
        """
        counts: dict[str, Any] = {name: value.tolist() for name, value in self.counts.items()}
        rows = [max(1, n) for n in counts["rows"]]
        shares: dict[str, Any] = {
            name: [round(n / d, 4) for n, d in zip(counts[name], rows, strict=True)]
            for name in ("best", "among", "chosen")
            if name in counts
        }
        prefix = counts.get("chosen_prefix", counts["best_prefix"])
        return {
            "step": trainer.done,
            "loss": sum(self.losses) / len(self.losses),
            "norm": sum(self.norms) / len(self.norms),
            "learning_rate": trainer.optimizer.learning_rate.tolist(),
            "length": 1 + sum(n / rows[0] for n in prefix),
            "blocks_per_second": rows[0] * trainer.group.size() / (time.monotonic() - self.began),
            **shares,
        }


def drop_lines(path: Path, step: int) -> None:
    """Drop log lines newer than the checkpoint we resume from, and a line that is cut off."""
    if not path.is_file():
        return
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
    if kept != lines:
        partial = path.with_suffix(".partial")
        partial.write_text("".join(kept), encoding="utf-8")
        partial.replace(path)


def append(path: Path, line: dict[str, Any]) -> None:
    """Add a line to a log."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
