"""Time a form of an op in a chain of calls that wait for one another, as a model's layers do.

A single call would show the time of waiting for the device, and independent ones could overlap.
"""

import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from ._common import as_tuple

# Calls that are handed to the device at once.
CALLS = 64


def seconds_a_call(
    form: Callable,
    arguments: tuple,
    calls: int = CALLS,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Time ``calls`` calls of a form with one wait; the caller warms it up."""
    start = clock()
    mx.eval(chain(form, arguments, calls))
    return (clock() - start) / calls


def chain(form: Callable, arguments: tuple, calls: int) -> tuple[mx.array, ...]:
    """Build a chain of calls; return the outputs of the last one."""
    outputs: tuple[mx.array, ...] = ()
    for _ in range(calls):
        outputs = as_tuple(form(*(_after(arguments, outputs[0]) if outputs else arguments)))
    return outputs


def _after(arguments: Any, output: mx.array) -> Any:
    """Return the arguments, the first array of which waits for an output."""
    first, *rest = arguments
    if isinstance(first, mx.array):
        # MLX orders launches by the buffers that they share: the values have to be new.
        first = first + (output.reshape(-1)[0] * 0).astype(first.dtype)
    else:
        first = _after(first, output)
    values = (first, *rest)
    return arguments._make(values) if hasattr(arguments, "_make") else values
