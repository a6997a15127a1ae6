"""The cache in the temporary folder: all checkouts of a user share it, and it may be cleaned."""

import os
import shutil
import subprocess
import sys

import pytest

from .compiler import CACHE, HERE, KERNELS, runtime_library

# Includes what is precompiled, as MLX's own kernels do.
PROGRAM = """
from metal_on_cpu.running import run_source
header = '#include <metal_simdgroup>\\n#include "mlx/backend/metal/kernels/utils.h"\\n'
run_source("out[thread_position_in_grid.x] = inp[0]; // {}", header=header)
"""


@pytest.fixture
def cache(clang, tmp_path):
    """A cache without headers; to build the emulated GPU would take seconds."""
    folder = tmp_path / CACHE.name
    folder.mkdir()
    shutil.copy(runtime_library(), folder)
    return folder


def compile_in(folder, text):
    """Compile a new kernel with a checkout's bench, the cache beside its folder."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(text)],
        cwd=folder,
        env=os.environ | {"TMPDIR": str(folder.parent)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_two_checkouts_share_a_cache(cache, tmp_path):
    for checkout in ("first", "second"):
        folder = tmp_path / checkout
        shutil.copytree(HERE, folder / HERE.name, ignore=shutil.ignore_patterns("__pycache__"))
        compile_in(folder, checkout)
    assert len([*cache.glob("*.pch")]) == len([*cache.glob("headers-*")]) == 1


def test_headers_that_were_cleaned_away_come_back(cache, tmp_path):
    (tmp_path / "checkout").symlink_to(HERE.parent)
    compile_in(tmp_path / "checkout", "before")
    (folder,) = cache.glob("headers-*")
    (folder / KERNELS / "utils.h").unlink()
    (folder / "msl" / "types.h").unlink()
    compile_in(tmp_path / "checkout", "after")
