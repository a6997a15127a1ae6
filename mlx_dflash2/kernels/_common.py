"""What the kernel modules share: sources, cached scalars, and the choice between two forms."""

import warnings
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from pathlib import Path

import mlx.core as mx

_PACKAGE = Path(__file__).resolve().parents[1]
# In a wheel the kernels lie inside the package, in a checkout beside it.
_FOLDERS = (_PACKAGE / "metal", _PACKAGE.parent / "metal")
# Wide enough for bfloat16; a kernel that is wrong is wrong by more.
_PROBE_TOLERANCE = 0.05

MAX_K = 64


class PlainFormWarning(Warning):
    """A kernel, or every kernel, gives way to its plain MLX form: right, but slower."""


def load_source(name: str) -> str:
    """The text of ``metal/<name>``.

    Errors: ``FileNotFoundError`` naming the file.
    """
    for folder in _FOLDERS:
        if (folder / name).is_file():
            return (folder / name).read_text()
    raise FileNotFoundError(f"{name} is in none of {', '.join(map(str, _FOLDERS))}.")


@cache
def build(
    name: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    headers: tuple[str, ...] = (),
    row_contiguous: bool = True,
) -> Callable:
    """The kernel object for ``metal/<name>.metal``, built once."""
    return mx.fast.metal_kernel(
        name=name,
        input_names=list(inputs),
        output_names=list(outputs),
        source=load_source(f"{name}.metal"),
        header="".join(load_source(header) for header in headers),
        ensure_row_contiguous=row_contiguous,
    )


@cache
def scalar(value: float) -> mx.array:
    """A cached 0-d float32 array; a kernel gets it as a constant."""
    return mx.array(value, dtype=mx.float32)


@cache
def unused(dtype: mx.Dtype) -> mx.array:
    """In the place of an input that a specialisation does not read; nothing is launched for it."""
    return mx.array([0], dtype=dtype)


class KernelSet:
    """Which kernels run on one device, found out by launching each of them once.

    A kernel is tried for every specialisation, because registers and threadgroup memory, which
    decide whether it can be launched, depend on the specialisation.
    """

    def __init__(self):
        self._reasons: dict[tuple, str | None] = {}

    @cached_property
    def unavailable(self) -> str | None:
        """Why no kernel can run on this device; ``None`` where the smallest one does."""
        reason = _failure(_smallest_kernel)
        if reason:
            _warn(f"The plain MLX forms of all kernels are used: {reason}")
        return reason

    def runs(self, name: str, specialisation: tuple, probe: Callable[[], str | None]) -> bool:
        """Whether to use a kernel; the first time for a specialisation, ``probe`` finds out."""
        key = (name, *specialisation)
        if key not in self._reasons:
            self._reasons[key] = self.unavailable or _failure(probe)
            if self._reasons[key] and not self.unavailable:
                _warn(f"The plain MLX form of the kernel {name} is used: {self._reasons[key]}")
        return self._reasons[key] is None

    def active(self) -> dict[str, str]:
        """What was chosen so far: ``"metal"``, or ``"plain: "`` and the reason."""
        chosen: dict[str, str] = {}
        for (name, *_), reason in self._reasons.items():
            if reason or name not in chosen:
                chosen[name] = f"plain: {reason}" if reason else "metal"
        return chosen


@cache
def _kernel_set(device: str) -> KernelSet:
    return KernelSet()


def active_kernels() -> dict[str, str]:
    """The form that runs on the default device for each kernel used so far, by name."""
    return _kernel_set(str(mx.default_device())).active()


def use_kernel(
    kernel: Callable, ops: Callable, specialisation: tuple, example: Callable[[], tuple]
) -> bool:
    """Choose between the kernel and its plain MLX form, once for each specialisation and device.

    The kernel is launched on small inputs, from ``example``, and has to agree with the plain form.
    """
    name = kernel.__name__.removesuffix("_kernel")
    chosen = _kernel_set(str(mx.default_device()))
    return chosen.runs(name, specialisation, lambda: _disagreement(kernel, ops, example()))


def _warn(message: str) -> None:
    warnings.warn(message, PlainFormWarning, stacklevel=2)


def _failure(probe: Callable[[], str | None]) -> str | None:
    """What a probe says, or the error that MLX raises where it cannot build or launch."""
    try:
        return probe()
    except (RuntimeError, ValueError) as error:
        return str(error).strip() or type(error).__name__


def _smallest_kernel() -> str | None:
    out = mx.fast.metal_kernel(
        name="smallest",
        input_names=["x"],
        output_names=["out"],
        source="out[thread_position_in_grid.x] = x[0] + 1.0f;",
    )(
        inputs=[unused(mx.float32)],
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
        output_shapes=[(1,)],
        output_dtypes=[mx.float32],
    )[0]
    return None if out.tolist() == [1.0] else f"a kernel that returns 1.0 returned {out.tolist()}"


def _disagreement(kernel: Callable, ops: Callable, arguments: tuple) -> str | None:
    got, expected = _as_tuple(kernel(*arguments)), _as_tuple(ops(*arguments))
    mx.eval(got, expected)
    for number, (a, b) in enumerate(zip(got, expected, strict=True)):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return f"output {number} is {a.dtype} {a.shape}, not {b.dtype} {b.shape}"
        a, b = a.astype(mx.float32), b.astype(mx.float32)
        error = mx.abs(a - b).max() / mx.maximum(mx.abs(b).max(), 1e-6)
        if not error.item() <= _PROBE_TOLERANCE:
            return f"output {number} differs from the plain form by {error.item():.1e}"
    return None


def _as_tuple(outputs: mx.array | Sequence[mx.array]) -> tuple[mx.array, ...]:
    return (outputs,) if isinstance(outputs, mx.array) else tuple(outputs)


def pattern(shape: tuple[int, ...], dtype: mx.Dtype = mx.float32, salt: int = 1) -> mx.array:
    """Numbers in [-0.5, 0.5) without order or repetition, for the small inputs of a probe."""
    count = 1
    for size in shape:
        count *= size
    index = mx.arange(count, dtype=mx.uint32) * 40503 + 7919 * salt
    return ((index % 65521).astype(mx.float32) / 65521 - 0.5).reshape(shape).astype(dtype)
