"""Check the Metal kernels on this machine, on the inputs that the tests use."""

import warnings
from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx

from ..evaluation.machine import version
from ..kernels import _common
from ..kernels.cases import Case, all_cases, largest_error
from ..kernels.chain import seconds_a_call
from .options import DEFAULT_REPEATS


class Result(NamedTuple):
    """A kernel on one set of inputs, or MLX's message about its ``failure``.

    ``error`` is in units of the tolerance, at most 1 is right; times are in microseconds.
    """

    case: Case
    dtype: mx.Dtype
    error: float
    kernel_time: float
    plain_time: float
    failure: str | None = None

    @property
    def passed(self) -> bool:
        return self.failure is None and self.error <= 1


def check(case: Case, dtype: mx.Dtype, repeats: int = DEFAULT_REPEATS) -> Result:
    """Compare a case's kernel with its reference, and its time with the plain form's."""
    kernel, plain = case.forms()
    arguments = case.make(dtype)
    try:
        outputs = kernel(*arguments)
        mx.eval(outputs)
    except (RuntimeError, ValueError) as error:
        return Result(case, dtype, float("nan"), float("nan"), float("nan"), str(error))
    outputs = (outputs,) if isinstance(outputs, mx.array) else tuple(outputs)
    largest = largest_error(outputs, case.expected(arguments))
    kernel_time, plain_time = (_microseconds(form, arguments, repeats) for form in (kernel, plain))
    return Result(case, dtype, largest, kernel_time, plain_time)


def _microseconds(form: Callable, arguments: tuple, repeats: int = DEFAULT_REPEATS) -> float:
    mx.eval(form(*arguments))
    return seconds_a_call(form, arguments, repeats) * 1e6


def why_no_kernels() -> str | None:
    """Return why the default device runs no kernel, or ``None`` if it does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _common.KernelSet().unavailable


_ROW = "{:<20} {:<36} {:<9} {:>9} {:>11} {:>10}  {}"


def doctor_kernels(repeats: int = DEFAULT_REPEATS) -> int:
    """Print the table of all kernels; return how many cases did not pass, 1 without Metal."""
    if reason := why_no_kernels():
        print(f"No Metal kernel runs on this machine: {reason}")
        return 1
    print(f"MLX {version('mlx')} on {mx.default_device()}; error in units of the tolerance")
    print(_ROW.format("kernel", "shape", "dtype", "error", "kernel us", "plain us", ""))
    failed = 0
    for case, dtype in [(c, d) for c in all_cases() for d in c.dtypes]:
        result, name = check(case, dtype, repeats), str(dtype).split(".")[-1]
        numbers = (result.error, result.kernel_time, result.plain_time)
        verdict = result.failure or ("ok" if result.passed else "WRONG")
        print(_ROW.format(case.kernel, case.shape, name, *(f"{x:.3g}" for x in numbers), verdict))
        failed += not result.passed
    print(f"{failed} failed" if failed else "all kernels are right")
    return failed
