"""What the kernel modules share: sources, kernel objects, and the choice between two forms."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import mlx.core as mx

_PACKAGE = Path(__file__).resolve().parents[1]
# In a wheel the kernels lie inside the package, in a checkout beside it.
_FOLDERS = (_PACKAGE / "metal", _PACKAGE.parent / "metal")
# Wide enough for bfloat16; a wrong kernel is off by more.
_PROBE_TOLERANCE = 0.05

MAX_K = 64

P = ParamSpec("P")
T = TypeVar("T")


class PlainFormWarning(Warning):
    """A kernel, or every kernel, is replaced by its plain MLX form: correct, but slower."""


def load_source(name: str) -> str:
    """Read ``metal/<name>``.

    Raises:
        FileNotFoundError: naming the file and the folders searched.
    """
    for folder in _FOLDERS:
        if (folder / name).is_file():
            return (folder / name).read_text()
    raise FileNotFoundError(f"{name} is in none of {', '.join(map(str, _FOLDERS))}.")


def placeholder(dtype: mx.Dtype) -> mx.array:
    """Stand in for an input that a specialization does not read."""
    return mx.array([0], dtype=dtype)


class KernelSet:
    """Which kernels run on one device, found out by launching each of them once.

    A kernel is tried for every specialization, because registers and threadgroup memory, which
    decide whether it can be launched, depend on the specialization.
    """

    def __init__(self) -> None:
        self._reasons: dict[tuple, str | None] = {}
        self._seen: set[tuple] = set()
        # Of the kernel for few rows against MLX's own product; see race.py.
        self.race: Any = None

    @cached_property
    def unavailable(self) -> str | None:
        """Why no kernel can run on this device; ``None`` where the smallest one does."""
        reason = _failure(_smallest_kernel)
        if reason and not mx.metal.is_available():
            # The normal case on a CPU, which the summary tells.
            return "this MLX has no Metal"
        if reason:
            _warn(f"The plain MLX forms of all kernels are used: {reason}")
        return reason

    def runs(self, name: str, specialization: tuple, probe: Callable[[], str | None]) -> bool:
        """Return whether to use a kernel; ``probe`` says once for each specialization why not."""
        key = (name, *specialization)
        if key not in self._reasons:
            self._reasons[key] = self.unavailable or _failure(probe)
            if self._reasons[key] and not self.unavailable:
                _warn(f"The plain MLX form of the kernel {name} is used: {self._reasons[key]}")
        return self._reasons[key] is None

    def switch_off(self) -> None:
        """Use no kernel on this device."""
        self.unavailable = "kernels are switched off"

    def first_time(self, key: tuple) -> bool:
        """Tell whether this is the first call with a key."""
        first = key not in self._seen
        self._seen.add(key)
        return first

    def active(self) -> dict[str, str]:
        """Return the form in use by kernel: ``"metal"``, or ``"plain: "`` and the reason."""
        chosen: dict[str, str] = {}
        for (name, *_), reason in self._reasons.items():
            if reason or name not in chosen:
                chosen[name] = f"plain: {reason}" if reason else "metal"
        return chosen


class KernelLibrary:
    """Kernel objects by name, and for each device the kernels that run on it.

    The process has one, :data:`LIBRARY`. MLX compiles through the kernel object, and what runs on
    a device does not change, so both are worth keeping across models and generators.
    """

    def __init__(self) -> None:
        self._kernels: dict[str, Callable[..., list[mx.array]]] = {}
        self._devices: dict[str, KernelSet] = {}

    def kernel(
        self,
        name: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        headers: Sequence[str] = (),
        row_contiguous: bool = True,
    ) -> Callable[..., list[mx.array]]:
        """Return the kernel object of ``metal/<name>.metal``, built at the first call."""
        if name not in self._kernels:
            kernel: Any = mx.fast.metal_kernel(
                name=name,
                input_names=list(inputs),
                output_names=list(outputs),
                source=load_source(f"{name}.metal"),
                header="".join(load_source(header) for header in headers),
                ensure_row_contiguous=row_contiguous,
            )
            self._kernels[name] = kernel
        return self._kernels[name]

    def on(self, device: str) -> KernelSet:
        """Return the kernels of a device, by its name."""
        if device not in self._devices:
            self._devices[device] = KernelSet()
        return self._devices[device]

    def clear(self) -> None:
        """Forget everything."""
        self._kernels.clear()
        self._devices.clear()


LIBRARY = KernelLibrary()


def active_kernels() -> dict[str, str]:
    """The form that runs on the default device for each kernel used so far, by name."""
    return LIBRARY.on(str(mx.default_device())).active()


def switch_off() -> None:
    """Use no kernel on the default device for as long as the process runs."""
    LIBRARY.on(str(mx.default_device())).switch_off()


def first_time(key: tuple) -> bool:
    """Tell whether something is done for the first time on the default device."""
    return LIBRARY.on(str(mx.default_device())).first_time(key)


class Probe(NamedTuple):
    """What has to be known to try a kernel.

    Attributes:
        specialization (tuple): Everything that the kernel's compiled code depends on.
        example (callable): Makes small arguments of the same specialization.
    """

    specialization: tuple
    example: Callable[[], tuple]


class Op(Generic[P, T]):
    """An op with two forms: a call takes the kernel where it runs, else the plain MLX form.

    The kernel is launched once for each specialization and device, on small arguments, and has to
    agree with the plain form.

    Args:
        kernel (callable): The Metal form, named ``<name>_kernel``.
        ops (callable): The plain MLX form, with the same arguments and results.
        probe (callable): From the arguments of a call to a :class:`Probe`, or to ``None`` where
            the kernel does not take them.
    """

    def __init__(
        self, kernel: Callable[P, T], ops: Callable[P, T], probe: Callable[P, Probe | None]
    ) -> None:
        self.kernel, self.ops, self._probe = kernel, ops, probe
        self.name = kernel.__name__.removesuffix("_kernel")
        self.__doc__ = ops.__doc__

    def runs_kernel(self, *args: P.args, **kwargs: P.kwargs) -> bool:
        """Return whether a call with these arguments takes the kernel."""
        probe = self._probe(*args, **kwargs)
        if probe is None:
            return False
        return LIBRARY.on(str(mx.default_device())).runs(
            self.name,
            probe.specialization,
            lambda: disagreement(self.kernel, self.ops, probe.example()),
        )

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        form = self.kernel if self.runs_kernel(*args, **kwargs) else self.ops
        return form(*args, **kwargs)


def _warn(message: str) -> None:
    warnings.warn(message, PlainFormWarning, stacklevel=2)


def _failure(probe: Callable[[], str | None]) -> str | None:
    """Return what a probe says, or the error that MLX raises where it cannot build or launch."""
    try:
        return probe()
    except (RuntimeError, ValueError) as error:
        return str(error).strip() or type(error).__name__


def _smallest_kernel() -> str | None:
    kernel: Any = mx.fast.metal_kernel(
        name="smallest",
        input_names=["x"],
        output_names=["out"],
        source="out[thread_position_in_grid.x] = x[0] + 1.0f;",
    )
    (out,) = kernel(
        inputs=[placeholder(mx.float32)],
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
        output_shapes=[(1,)],
        output_dtypes=[mx.float32],
        # Without one MLX takes the GPU's, also where the CPU is the default device.
        stream=mx.default_stream(mx.default_device()),
    )
    return None if out.tolist() == [1.0] else f"a kernel that returns 1.0 returned {out.tolist()}"


def disagreement(kernel: Callable, ops: Callable, arguments: tuple) -> str | None:
    """Run both forms; return how their outputs differ, or ``None``."""
    got, expected = as_tuple(kernel(*arguments)), as_tuple(ops(*arguments))
    mx.eval(got, expected)
    for number, (a, b) in enumerate(zip(got, expected, strict=True)):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return f"output {number} is {a.dtype} {a.shape}, not {b.dtype} {b.shape}"
        a, b = a.astype(mx.float32), b.astype(mx.float32)
        scale = mx.where(mx.abs(b) < float("inf"), mx.abs(b), 0).max()
        # Two equal infinities have no difference.
        difference = mx.where(a == b, 0, mx.abs(a - b)).max()
        error = float(difference / mx.maximum(scale, 1e-6))
        if not error <= _PROBE_TOLERANCE:
            return f"output {number} differs from the plain form by {error:.1e}"
    return None


def as_tuple(outputs: mx.array | Sequence[mx.array]) -> tuple[mx.array, ...]:
    """Return an op's outputs as a tuple, also where it has one."""
    return (outputs,) if isinstance(outputs, mx.array) else tuple(outputs)


def pattern(shape: tuple[int, ...], dtype: mx.Dtype = mx.float32, salt: int = 1) -> mx.array:
    """Make small inputs for a probe: numbers in [-0.5, 0.5) without order or repetition."""
    index = mx.arange(prod(shape), dtype=mx.uint32) * 40503 + 7919 * salt
    return ((index % 65521).astype(mx.float32) / 65521 - 0.5).reshape(shape).astype(dtype)


def patterns(shapes: Iterable[tuple[int, ...]], dtypes: Iterable[mx.Dtype]) -> tuple[mx.array, ...]:
    """Make a different :func:`pattern` for each shape and dtype."""
    both = zip(shapes, dtypes, strict=True)
    return tuple(pattern(shape, dtype, salt) for salt, (shape, dtype) in enumerate(both, start=1))
