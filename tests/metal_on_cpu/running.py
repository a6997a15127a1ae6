"""Ways to run a kernel on the bench: from its text, from an op, from a module of mlx-lm."""

import importlib
import importlib.util

import mlx.core as mx

from .bench import BenchKernel


def run_source(
    source, n=64, group=64, size=None, dtype=mx.float32, header="", grid=None, **options
):
    """Run a kernel of one input and one output."""
    call = {key: options.pop(key) for key in ("init_value", "template") if key in options}
    kernel = BenchKernel("small", ["inp"], ["out"], source, header, **options)
    return kernel(
        inputs=[mx.arange(n).astype(mx.float32)],
        grid=grid or (n, 1, 1),
        threadgroup=(group, 1, 1),
        output_shapes=[(size or n,)],
        output_dtypes=[dtype],
        **call,
    )[0]


def run_op(form, arguments):
    """The outputs of a form of an op, always as a tuple."""
    outputs = form(*arguments)
    return (outputs,) if isinstance(outputs, mx.array) else tuple(outputs)


def reload(name, metal_cpu, monkeypatch):
    """A fresh copy of a module that builds its kernels at import, on the bench."""
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    module = importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(module.__name__, module.__file__)
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy
