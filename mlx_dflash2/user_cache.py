"""What is made once and kept in the user's cache folder."""

import fcntl
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path


def user_cache() -> Path:
    """Return the folder in which the package keeps what it has made."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "mlx_dflash2"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlx_dflash2"


def build_once(folder: Path, files: Sequence[str], write: Callable[[Path], None]) -> Path:
    """Make a folder unless it is there, whole or not at all, also with several processes at it.

    Args:
        folder (Path): The folder to make; its parents are made, too.
        files (sequence of str): The files that a complete folder holds.
        write (callable): Writes them into the empty folder that it is given.

    Returns:
        Path: ``folder``.
    """
    if not _is_complete(folder, files):
        _build(folder, files, write)
    return folder


def _is_complete(folder: Path, files: Sequence[str]) -> bool:
    # A build leaves all files or no folder, but a cleaner may have removed some since.
    return all((folder / name).is_file() for name in files)


def _build(folder: Path, files: Sequence[str], write: Callable[[Path], None]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.partial")
    # The lock ends with its process: with the lock held, a partial folder is a leftover.
    with open(folder.with_name(f".{folder.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _is_complete(folder, files):
            return
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir()
            write(partial)
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
