"""Describe a machine: chip, memory, versions, kernels, disk and hub cache."""

import shutil
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import constants

from ..blas.measure import blas_file, blas_threads, gflops
from ..cli.versions import version_problem
from ..evaluation.machine import environment
from .chips import find_chip
from .kernels import why_no_kernels


def report() -> Iterator[str]:
    """Yield one line a fact. A line that starts with ``!`` is a problem."""
    found = environment()
    yield f"chip: {found['chip']}, {found['cores']} cores, {found['machine']}"
    if (chip := find_chip(found["chip"])) is not None:
        low, high = chip.bandwidth
        yield f"memory bandwidth: {low:g}" + (f" to {high:g}" if high > low else "") + " GB/s"
    memory = f"memory: {found['memory'] / 1e9:.1f} GB"
    if found["working_set"]:
        memory += f", of which {found['working_set'] / 1e9:.1f} GB are a recommended working set"
    yield memory
    yield f"system: {found['os']}, Python {found['python']}, MLX computes on the {found['device']}"
    yield "versions: " + ", ".join(f"{k} {v}" for k, v in found["versions"].items() if v)
    problem = version_problem()
    yield "versions: all in the tested range" if problem is None else f"! {problem}"
    yield from _kernels()
    yield _blas()
    yield from _disk()


def _kernels() -> Iterator[str]:
    if (reason := why_no_kernels()) is None:
        yield "Metal kernels: available"
    else:
        yield f"Metal kernels: none, plain MLX is used instead: {' '.join(reason.split())}"


def _blas() -> str:
    threads = blas_threads()
    count = "" if threads is None else f", {threads} thread{'s' if threads > 1 else ''}"
    return f"BLAS of MLX's CPU backend: {blas_file()}{count}, {gflops():.3g} GFLOP/s in float32"


def _disk() -> Iterator[str]:
    cache = Path(constants.HF_HUB_CACHE)
    place = next(path for path in (cache, *cache.parents) if path.exists())
    yield f"disk: {shutil.disk_usage(place).free / 1e9:.1f} GB free at {place}"
    models = sorted(cache.glob("models--*")) if cache.is_dir() else []
    yield f"hub cache: {cache}, {len(models)} models"
