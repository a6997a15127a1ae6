"""What a run says of its steps: the lines of its log."""

import json
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map


class Report:
    """What some steps did together."""

    def __init__(self):
        self.losses, self.norms, self.counts = [], [], None
        self.began = time.monotonic()

    def add(self, result: dict[str, Any]):
        """Take in what :meth:`Trainer.step` gave."""
        self.losses.append(result["loss"])
        self.norms.append(result["norm"])
        counts = result["counts"]
        self.counts = counts if self.counts is None else tree_map(mx.add, self.counts, counts)

    def line(self, trainer: Any) -> dict[str, Any]:
        """As a line of the log: shares are of all rows of a position, whatever was before them.

        ``length`` is the acceptance length over the anchors drawn. It overstates decoding's,
        which visits hard places more often.

        Args:
            trainer (Trainer): Behind the last of these steps.
        """
        counts = {name: value.tolist() for name, value in self.counts.items()}
        rows = [max(1, n) for n in counts["rows"]]

        def share(name: str) -> list[float]:
            return [round(n / d, 4) for n, d in zip(counts[name], rows, strict=True)]

        prefix = counts.get("chosen_prefix", counts["best_prefix"])
        shares = {name: share(name) for name in ("best", "among", "chosen") if name in counts}
        return {
            "step": trainer.done,
            "loss": sum(self.losses) / len(self.losses),
            "norm": sum(self.norms) / len(self.norms),
            "learning_rate": float(trainer.optimizer.learning_rate.item()),
            "length": 1 + sum(n / rows[0] for n in prefix),
            "blocks_per_second": rows[0] * trainer.group.size() / (time.monotonic() - self.began),
            **shares,
        }


def drop_lines(path: Path, step: int):
    """Remove from a log what came behind the checkpoint that is gone on from.

    So is a last line that was not written to its end.
    """
    if not path.is_file():
        return
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
    if kept != lines:
        partial = path.with_suffix(".partial")
        partial.write_text("".join(kept), encoding="utf-8")
        partial.replace(path)


def append(path: Path, line: dict[str, Any]):
    """Add a line to a log."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
