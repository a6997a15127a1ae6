"""Which BLAS MLX's CPU backend multiplies with, and how fast."""

import ctypes
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx

from .library import PREFIX

# 0.27 GFLOP a product: a tenth of a second with the slowest BLAS, a millisecond with a fast one.
SIZE = 512
REPEATS = 5
# The folder of the libraries that the wheel for Linux brings.
WHEEL_LIBRARIES = "mlx_cpu.libs"


class _Symbol(ctypes.Structure):
    """``Dl_info`` of the C library."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def blas_file() -> str:
    """Return the file of the BLAS that MLX's CPU backend calls, ``Accelerate`` on a Mac."""
    if sys.platform == "darwin":
        return "Accelerate"
    # The dynamic linker searches the global symbols first, then the libraries that MLX names.
    for scope in (None, mx.__file__):
        library = ctypes.CDLL(scope)
        if hasattr(library, "cblas_sgemm"):
            return _file_of(library["cblas_sgemm"])
    return "unknown"


def has_slow_blas() -> bool:
    """Return whether MLX's CPU backend calls the BLAS of its own wheel for Linux."""
    return Path(blas_file()).parent.name == WHEEL_LIBRARIES


def _file_of(function: Any) -> str:
    found = _Symbol()
    ctypes.CDLL(None).dladdr(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(found))
    return os.path.realpath(found.file.decode()) if found.file else "unknown"


def blas_threads() -> int | None:
    """Return the threads of the fast BLAS, ``None`` with another one."""
    library = ctypes.CDLL(None)
    name = f"{PREFIX}openblas_get_num_threads"
    return library[name]() if hasattr(library, name) else None


def gflops() -> float:
    """Measure a float32 matrix product of MLX's CPU backend, in GFLOP/s."""
    with mx.stream(mx.cpu):
        a, b = mx.ones((SIZE, SIZE)), mx.ones((SIZE, SIZE))
        mx.eval(a, b)
        seconds = []
        for _ in range(REPEATS + 1):
            start = time.perf_counter()
            mx.eval(a @ b)
            seconds.append(time.perf_counter() - start)
    # The first product is a warm-up.
    return 2 * SIZE**3 / statistics.median(seconds[1:]) / 1e9
