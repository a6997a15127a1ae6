"""What the processes of a distributed run decide together; rank 0's word counts."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

# Bytes that are read of either end of a weight file.
_SAMPLE = 1 << 20


def group_of(model: nn.Module) -> mx.distributed.Group | None:
    """Return the group that a model's layers are split over; ``None`` for a whole model."""
    for module in model.modules():
        for name in ("group", "sharding_group"):
            group = getattr(module, name, None)
            if isinstance(group, mx.distributed.Group) and group.size() > 1:
                return group
    return None


@dataclass(frozen=True)
class Ranks:
    """The processes of a group; all of them have to make the same calls in the same order.

    Attributes:
        group (mx.distributed.Group): One process is a group, too.
    """

    group: mx.distributed.Group

    @property
    def rank(self) -> int:
        """The number of this process."""
        return self.group.rank()

    @property
    def size(self) -> int:
        """How many processes there are."""
        return self.group.size()

    def share(self, value: Any) -> Any:
        """Return rank 0's value, which JSON has to be able to hold."""
        if self.size == 1:
            return value
        data = json.dumps(value).encode() if self.rank == 0 else b""
        length = np.array(self._sum(mx.array(len(data))))
        own = np.frombuffer(data, np.uint8) if data else np.zeros(length, np.uint8)
        return json.loads(np.array(self._sum(mx.array(own))).tobytes())

    def check_same(self, what: str, value: Any) -> None:
        """Check that all ranks have the same value.

        Args:
            what (str): What it is, for the error.
            value (any): Of which JSON can hold the text; errors show it shortened.

        Raises:
            ValueError: on every rank, with this rank's value and the first other one.
        """
        if self.size == 1:
            return
        text = json.dumps(value, default=str)
        own = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
        gather = mx.distributed.all_gather
        # Values are compared whole, and shown as far as they fit.
        row = mx.array(np.concatenate([own, _padded(text)]))[None]
        rows = np.array(gather(row, group=self.group, stream=mx.cpu))
        for rank, other in enumerate(rows):
            if not np.array_equal(other[: own.size], rows[0, : own.size]):
                first, second = (bytes(r[own.size :]).rstrip(b" ") for r in (rows[0], other))
                raise ValueError(
                    f"The ranks differ in {what}: rank 0 has {first.decode(errors='replace')}, "
                    f"rank {rank} has {second.decode(errors='replace')}."
                )

    def _sum(self, x: mx.array) -> mx.array:
        return mx.distributed.all_sum(x, group=self.group, stream=mx.cpu)


def _padded(text: str, size: int = 160) -> np.ndarray:
    return np.frombuffer(text.encode()[:size].ljust(size), np.uint8)


def fingerprint(folder: Path, files: Iterable[Path]) -> str:
    """Hash a model's config and samples of its weight files, in a few characters.

    Args:
        folder (Path): With config.json.
        files (iterable of Path): The weight files.
    """
    found = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(files):
        size = file.stat().st_size
        with file.open("rb") as data:
            found.update(f"{file.name} {size}".encode() + data.read(_SAMPLE))
            data.seek(max(0, size - _SAMPLE))
            found.update(data.read(_SAMPLE))
    return found.hexdigest()[:12]
