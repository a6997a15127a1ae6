"""Counts what each kernel executes at the shapes of Qwen3.8-27B, and MLX's own product beside it.

    python tools/kernel_counts.py

It needs clang 19, as the bench (tests/metal_on_cpu). A count is not a time. Fails if a kernel
executes more than is recorded.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import mlx.core as mx

# The bench is not part of the package.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mlx_dflash2.kernels import cases, qmm_rows
from mlx_dflash2.kernels._common import LIBRARY
from tests.metal_on_cpu import BenchKernel, Launch, launch_with
from tests.metal_on_cpu.counts import Counts
from tests.metal_on_cpu.stock import qmv, qmv_wide, sdpa_vector

# A few weight rows stand for all: what a weight costs does not depend on their number.
K, N, GROUP = 5120, 64, 64


class Item(NamedTuple):
    """A launch to count: its label, the unit and how many of it, and the most instructions."""

    label: str
    unit: str
    units: int
    most: float
    run: Callable[[], object]


def items() -> Iterator[Item]:
    """What is counted."""
    for bits, rows, ours, stock in ((4, 2, 6.5, 10.1), (4, 5, 10.7, 19.6), (4, 8, 14.9, 32.6),
                                    (4, 16, 31.2, 65.1), (8, 8, 15.1, 31.7)):  # fmt: skip
        make = partial(cases.quantized_matrix(rows, K, N, GROUP, bits), mx.bfloat16)
        label = f"{rows} rows, {bits} bits, K {K}"
        yield Item(f"qmm_rows {label}", "weight", K * N, ours, partial(_run, qmm_rows.kernel, make))
        yield Item(f"MLX's qmv_wide {label}", "weight", K * N, stock, partial(_run, qmv_wide, make))
    one = partial(cases.quantized_matrix(1, K, N, GROUP, 4), mx.bfloat16)
    label = f"MLX's qmv 1 row, 4 bits, K {K}"
    yield Item(label, "weight", K * N, 5.1, partial(_run, qmv, one))
    heads, keys, size = 6, 1024, 256
    label = f"MLX's sdpa_vector 1 row, {heads} heads, {keys} keys of {size}"
    run = partial(_run, sdpa_vector, partial(_attention, heads, keys, size))
    yield Item(label, "head's number", heads * keys * size, 10.3, run)
    for label, unit, units, most in (
        ("gated_delta_verify[B1 T8 P8 Hk16 Hv48 Dk128 Dv128]", "state number", 48 * 128 * 128, 182),
        ("grouped_conv[B1 L8 H5120 G320 K2]", "number", 8 * 5120, 31),
        ("grouped_conv_norm[B1 L8 H5120 G320 K2]", "number", 8 * 5120, 43.5),
        ("top_k[7x248320 k16]", "logit", 7 * 248320, 83),
        ("pair_walk[B1 L7 K16 R256 V5000]", "pair and rank", 7 * 16 * 16 * 256, 2.6),
    ):
        case = next(case for case in cases.all_cases() if str(case) == label)
        run = partial(_run, case.forms()[0], partial(case.make, mx.bfloat16))
        yield Item(label, unit, units, most, run)


def _attention(heads: int, keys: int, size: int) -> tuple[mx.array, ...]:
    shapes = [(1, heads, 1, size), (1, 1, keys, size), (1, 1, keys, size)]
    return tuple(mx.random.normal(shape).astype(mx.bfloat16) for shape in shapes)


def _run(form: Callable, make: Callable[[], tuple]) -> None:
    form(*make())


def count(run: Callable[[], object]) -> Counts:
    """What a call's launches execute."""
    LIBRARY.clear()
    with launch_with(Launch(mode="count", lint_header=False)) as launch:
        with patch.object(mx.fast, "metal_kernel", BenchKernel):
            run()
    LIBRARY.clear()
    return launch.counts


def main() -> None:
    row = "{:<52} {:<14} {:>7} {:>7} {:>7} {:>7} {:>8} {:>8} {:>7}"
    heads = ("all", "compute", "loads", "other", "bytes", "distinct", "groups")
    print(row.format("each", "", *heads))
    grown = []
    for label, unit, units, most, run in items():
        counts = count(run)
        loads = counts.load + counts.threadgroup
        other = counts.instructions - counts.alu - loads
        numbers = (counts.instructions, counts.alu, loads, other, counts.bytes_read,
                   counts.distinct_bytes)  # fmt: skip
        shown = [f"{number / units:.2f}" for number in numbers]
        print(row.format(label, unit, *shown, counts.threadgroups), flush=True)
        if counts.instructions / units > most:
            grown.append(f"{label}: {counts.instructions / units:.2f}, {most} recorded")
    print("\n".join(grown))
    sys.exit(bool(grown))


if __name__ == "__main__":
    main()
