"""Fixtures that need clang; without it they skip here and fail in CI on Linux."""

import os
import sys

import mlx.core as mx
import pytest
from support import NO_CLANG, WHAT_THE_BENCH_NEEDS

from mlx_dflash2.kernels._common import LIBRARY

from . import BenchKernel, Launch, launch_with, missing_tools


@pytest.fixture(scope="session")
def clang():
    """clang 19 and llvm-symbolizer 19."""
    if missing := missing_tools():
        # On a Mac the kernels themselves are tested.
        if os.environ.get("CI") == "true" and sys.platform == "linux":
            pytest.fail(f"{', '.join(missing)} not found; {WHAT_THE_BENCH_NEEDS}")
        pytest.skip(NO_CLANG)


@pytest.fixture
def launch(clang):
    """The way kernels are run in this test; change its fields before or between launches."""
    with launch_with(Launch()) as current:
        yield current


@pytest.fixture
def metal_cpu(launch, monkeypatch):
    """Every kernel that is built in this test runs on the bench."""
    monkeypatch.setattr(mx.fast, "metal_kernel", BenchKernel)
    return launch


@pytest.fixture
def kernels(metal_cpu):
    """The bench, and no kernel object or choice left over from another test."""
    LIBRARY.clear()
    yield metal_cpu
    LIBRARY.clear()
