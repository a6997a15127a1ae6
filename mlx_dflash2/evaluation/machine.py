"""Describe what a measurement is made on: machine, versions, and the models' files."""

import hashlib
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from .._version import __version__
from ..blas.measure import blas_file, blas_threads
from ..checkpoint.files import weight_files

VERSIONED = ("mlx", "mlx-lm", "transformers", "numpy", "huggingface_hub")
# A file's fingerprint reads this many samples of this many bytes.
_SAMPLES, _SAMPLE_SIZE = 64, 4096


def environment() -> dict[str, Any]:
    """Return machine, chip, memory in bytes, operating system, device and versions."""
    info = mx.device_info()
    return {
        "machine": platform.machine(),
        "chip": chip_name(),
        "cores": os.cpu_count(),
        "memory": memory_size(),
        "working_set": info.get("max_recommended_working_set_size"),
        "os": os_name(),
        "device": str(mx.default_device().type).removeprefix("DeviceType."),
        "blas": {"file": Path(blas_file()).name, "threads": blas_threads()},
        "python": platform.python_version(),
        "versions": {"mlx_dflash2": __version__} | {name: version(name) for name in VERSIONED},
    }


def version(package: str) -> str | None:
    """Return the installed version of a package, ``None`` without one."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def chip_name() -> str:
    """Return the processor's name, such as ``Apple M4 Max``."""
    if platform.system() == "Darwin":
        done = subprocess.run(
            ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"],
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout.strip() or platform.processor()
    return str(mx.device_info(mx.cpu).get("device_name") or platform.processor())


def memory_size() -> int:
    """Return the machine's memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_memory() -> int:
    """Bytes of memory that a process can still take, all of it where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return memory_size()
    found = dict(line.split(":", 1) for line in lines)
    return int(found["MemAvailable"].split()[0]) * 1024


def os_name() -> str:
    """Return name and version of the operating system."""
    if platform.system() == "Darwin":
        return f"macOS {platform.mac_ver()[0]}"
    return f"{platform.system()} {platform.release()}"


def num_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's parameters."""
    return sum(value.nbytes for value in dict(tree_flatten(model.parameters())).values())


def fingerprint(folder: Path, config: str = "config.json") -> str:
    """Return a short hash of a folder's config and of samples of its weight files.

    Reading all of a large model would take a minute. The header and evenly spaced samples
    distinguish a file from any other training or quantization of the same shapes.
    """
    digest = hashlib.sha256((folder / config).read_bytes())
    for file in weight_files(folder):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with open(file, "rb") as stream:
            for sample in range(_SAMPLES):
                stream.seek(sample * max(0, size - _SAMPLE_SIZE) // (_SAMPLES - 1))
                digest.update(stream.read(_SAMPLE_SIZE))
    return digest.hexdigest()[:16]
