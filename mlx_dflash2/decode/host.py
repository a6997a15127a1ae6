"""Numbers read from the device: each call waits for it."""

from typing import cast

import mlx.core as mx


def integer(x: mx.array) -> int:
    """The value of an integer array with one element."""
    return cast(int, x.item())


def integers(x: mx.array) -> list[int]:
    """The values of an integer array [N]."""
    return cast(list[int], x.tolist())


def floats(x: mx.array) -> list[float]:
    """The values of a floating-point array [N]."""
    return cast(list[float], x.tolist())
