"""A kernel object with the call of ``mx.fast.metal_kernel``'s, run on the emulated GPU."""

import math
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from .arrays import HostArray, dtype_name
from .compiler import MetalError, compile_kernel
from .counts import Counts
from .runtime import MAX_THREADS, Dispatch, Schedule, load
from .source import Generated, KernelText, generate


@dataclass
class Launch:
    """How kernels are run, and what the last one did.

    ``mode`` is ``check`` (every access is checked), ``fast``, or ``count``, which fills ``counts``
    with the sum over all launches. ``full_output`` demands that all
    elements of all outputs are written. ``edit`` changes what a kernel was built from, for mutants.
    """

    schedule: Schedule = field(default_factory=Schedule)
    mode: str = "check"
    full_output: bool = True
    lint_header: bool = True
    edit: Callable[[KernelText], KernelText] = lambda text: text
    launched: list[str] = field(default_factory=list)
    statistics: dict[str, int] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)


_current = [Launch()]


@contextmanager
def launch_with(launch: Launch):
    """Run kernels that way inside the block."""
    _current.append(launch)
    try:
        yield launch
    finally:
        _current.pop()


class BenchKernel:
    """Takes the place of the object that ``mx.fast.metal_kernel`` returns."""

    def __init__(
        self, name: str, input_names, output_names, source: str, header: str = "", **options
    ):
        options.pop("compile_options", None)
        names = tuple(input_names), tuple(output_names)
        self._text = KernelText(name, *names, source, header, **options)
        self._generated: dict[tuple, Generated] = {}

    def __call__(
        self,
        *,
        inputs: list,
        output_shapes: list,
        output_dtypes: list[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: list[tuple] | None = None,
        init_value: float | None = None,
        stream: mx.Stream | None = None,
    ) -> list[mx.array]:
        """Compile for these inputs and run; there is one GPU, whatever the ``stream``.

        Errors: :class:`MetalError` with all findings.
        """
        launch = _current[-1]
        text = launch.edit(self._text)
        launch.launched.append(text.name)
        if math.prod(threadgroup) > MAX_THREADS:
            raise MetalError([("limit", f"{math.prod(threadgroup)} threads in a threadgroup")])
        arrays = [HostArray.of(x) for x in inputs]
        generated = self._generate(
            text,
            arrays,
            template=template,
            grid=tuple(grid),
            threadgroup=tuple(threadgroup),
            output_shapes=[tuple(shape) for shape in output_shapes],
            output_dtypes=output_dtypes,
            init_value=init_value,
        )
        loaded = load(compile_kernel(text, generated, launch.mode, launch.lint_header))
        outputs = [
            HostArray.filled(tuple(shape), dtype_name(dtype), init_value)
            for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
        ]
        dispatch = Dispatch(loaded, launch.schedule, launch.mode == "check")
        try:
            return _run(dispatch, text, launch, arrays, outputs, grid, threadgroup, init_value)
        finally:
            dispatch.close()

    def _generate(self, text: KernelText, arrays: list[HostArray], **launch) -> Generated:
        key = (
            text,
            tuple((x.dtype, x.data.shape) for x in arrays),
            tuple((name, str(value)) for name, value in launch["template"] or ()),
            tuple(dtype_name(dtype) for dtype in launch["output_dtypes"]),
        )
        if key not in self._generated:
            self._generated[key] = generate(text, arrays, **launch)
        return self._generated[key]


def _add_input(dispatch: Dispatch, text: KernelText, name: str, array: HostArray) -> int:
    """Add an input and the shape, strides and rank that the source names; how many buffers."""
    data = np.ascontiguousarray(array.data) if text.ensure_row_contiguous else array.data
    strides = [s // data.itemsize for s in data.strides]
    dispatch.buffer(name, data if data.ndim == 0 else _storage(data), writable=False)
    about = {
        f"{name}_shape": np.array(data.shape, np.int32),
        f"{name}_strides": np.array(strides, np.int64),
        f"{name}_ndim": np.array(data.ndim, np.int32),
    }
    added = [key for key in about if data.ndim and key in text.source]
    for key in added:
        dispatch.buffer(key, about[key], writable=False)
    return 1 + len(added)


def _storage(data: np.ndarray) -> np.ndarray:
    """The flat memory that a strided array spans, from its first element on."""
    if data.size == 0:
        return data.reshape(-1)
    span = 1 + sum(
        (n - 1) * s // data.itemsize for n, s in zip(data.shape, data.strides, strict=True)
    )
    return np.lib.stride_tricks.as_strided(data, (span,), (data.itemsize,))


def _run(dispatch, text, launch, arrays, outputs, grid, threadgroup, init_value) -> list[mx.array]:
    buffers = 0
    for name, array in zip(text.input_names, arrays, strict=True):
        buffers += _add_input(dispatch, text, name, array)
    for name, output in zip(text.output_names, outputs, strict=True):
        dispatch.buffer(name, output.data, writable=True, initialised=init_value is not None)
    findings = dispatch.run(grid, threadgroup)
    results = []
    for i, (name, output) in enumerate(zip(text.output_names, outputs, strict=True)):
        data = dispatch.read(buffers + i, output.data)
        results.append(HostArray(data, output.dtype).to_mlx())
        if launch.full_output and launch.mode == "check" and init_value is None and not findings:
            missing = dispatch.unwritten(name, output.data)
            if missing.any():
                first = tuple(int(i) for i in np.argwhere(missing)[0])
                what = f"{missing.sum()} of {missing.size} elements of '{name}', first at {first}"
                findings.append(("unwritten", f"never written: {what}"))
    launch.statistics = dispatch.statistics()
    if launch.mode == "count":
        launch.counts = launch.counts + dispatch.counts(grid, threadgroup)
    if findings:
        raise MetalError(findings)
    return results
