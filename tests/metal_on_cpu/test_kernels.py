"""The package's kernels on the bench: against float64 NumPy, and against their plain forms."""

import mlx.core as mx
import pytest

from mlx_dflash2.kernels.cases import Case, all_cases, largest_error

from . import Schedule
from .running import run_op

CASES = [
    pytest.param(case, dtype, id=f"{case}-{str(dtype).split('.')[-1]}")
    for case in all_cases()
    for dtype in case.dtypes
]
QUICK = [param for param in CASES if not param.values[0].real]
REAL = [param for param in CASES if param.values[0].real]
# One case a kernel, with several threadgroups and several simdgroups each.
SCHEDULED = {
    "top_k": "2x9001 k16 tied",
    "pair_score": "B2 L3 K5 R33 V40",
    "path_walk": "B1 L4 K64 T0.8",
    "pair_walk": "B2 L3 K5 R33 V40 T8",
    "grouped_conv": "B2 L8 H96 G3 K2",
    "grouped_conv_norm": "B2 L8 H96 G3 K2",
    "top_p": "2x40 p0.7 tied",
    "qmm_rows": "M8 K512 N40 g64 b4",
    "gated_delta_verify": "B2 T3 P4 Hk2 Hv4 Dk16 Dv8",
}


def check(case: Case, dtype: mx.Dtype):
    kernel, ops = case.forms()
    arguments = case.make(dtype)
    outputs, plain = run_op(kernel, arguments), run_op(ops, arguments)
    expected = case.expected(arguments)
    assert largest_error(outputs, expected) <= 1
    assert largest_error(plain, expected) <= case.plain_error
    for a, b in zip(outputs, plain, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if not mx.issubdtype(a.dtype, mx.floating):
            assert mx.array_equal(a, b).item()


@pytest.mark.parametrize("case, dtype", QUICK)
def test_kernel(kernels, case, dtype):
    kernels.schedule = Schedule(seed=1, preempt=50)
    check(case, dtype)


@pytest.mark.parametrize("kernel", SCHEDULED)
def test_kernel_under_other_schedules(kernels, kernel):
    """Other orders of threads and of sums; memory that holds other things at first."""
    case = next(c for c in all_cases() if str(c) == f"{kernel}[{SCHEDULED[kernel]}]")
    for mode in ("check", "fast"):
        kernels.mode = mode
        kernels.schedule = Schedule("forward", poison="zero")
        check(case, mx.float32)
        kernels.schedule = Schedule("reverse", reduce_order=3, poison="random")
        check(case, mx.float32)
        for seed in range(2, 6):
            kernels.schedule = Schedule(seed=seed, preempt=3, reduce_order=seed)
            check(case, mx.float32)


@pytest.mark.slow
@pytest.mark.parametrize("case, dtype", REAL)
def test_kernel_at_real_size(kernels, case, dtype):
    kernels.mode = "fast"
    check(case, dtype)


def strided(x):
    """The same numbers, every other element in memory."""
    if isinstance(x, tuple):
        values = map(strided, x)
        return x._make(values) if hasattr(x, "_make") else tuple(values)
    if not isinstance(x, mx.array) or x.ndim == 0:
        return x
    return mx.stack([x, mx.zeros_like(x)], axis=-1)[..., 0]


@pytest.mark.parametrize("kernel", SCHEDULED)
def test_kernel_on_arrays_that_are_not_contiguous(kernels, kernel):
    case = next(c for c in all_cases() if str(c) == f"{kernel}[{SCHEDULED[kernel]}]")
    arguments, form = case.make(mx.bfloat16), case.forms()[0]
    for a, b in zip(run_op(form, arguments), run_op(form, strided(arguments)), strict=True):
        assert mx.array_equal(a, b).item()
