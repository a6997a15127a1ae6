"""Load the fast BLAS, so that MLX finds its functions before those of its own wheel."""

import ctypes
import os
import sys
from importlib import metadata
from pathlib import Path

from .library import FUNCTIONS, PREFIX, library
from .threads import num_threads

# The wheel with the slow BLAS. Without it, MLX computes on a GPU or was built with another one.
WHEEL = "mlx-cpu"
# OpenBLAS's own settings, which stay the user's.
THREADS = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")


def load_fast_blas() -> str | None:
    """Load the fast BLAS if MLX is going to use its wheel's; call it before MLX is imported.

    The library joins the global symbols of the process, which the dynamic linker searches before
    the libraries that MLX names. No environment variable is set, so a child process inherits
    nothing.

    Returns:
        str: One line if MLX stays with the slow BLAS, else ``None``.
    """
    if "mlx.core" in sys.modules or not _has_slow_blas():
        return None
    try:
        load(library())
    except OSError as error:
        return f"MLX multiplies with its slow BLAS: {' '.join(str(error).split())}"
    return None


def load(path: Path) -> None:
    """Load a BLAS of :func:`.library.library` for the whole process.

    Raises:
        OSError: if the library cannot be loaded.
    """
    loaded = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    set_threads = f"{PREFIX}openblas_set_num_threads"
    for name in (*FUNCTIONS, set_threads):
        if not hasattr(loaded, name):
            raise OSError(f"{path} has no function {name}")
    if not any(os.environ.get(name) for name in THREADS):
        loaded[set_threads](num_threads())


def _has_slow_blas() -> bool:
    """Return whether MLX will call the BLAS of its wheel: no other one is loaded before it."""
    if sys.platform != "linux" or any(hasattr(ctypes.CDLL(None), name) for name in FUNCTIONS):
        return False
    return any(metadata.distributions(name=WHEEL))
