"""Files that are replaced whole or not at all."""

import contextlib
import hashlib
import os
import secrets
import time
from pathlib import Path


def digest(raw: bytes | None) -> str:
    """Fingerprint a file's content; a missing file (None) has its own."""
    return "absent" if raw is None else hashlib.sha256(raw).hexdigest()


def read_bytes(path: Path) -> bytes | None:
    """The file's content, or None if there is no such file."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def back_up(path: Path, raw: bytes) -> Path:
    """Keep a copy of a file beside it, under a name with the time in it.

    Args:
        path (Path): The file; its mode and owner are copied too.
        raw (bytes): Its content.
    Returns:
        Path: The copy.
    Raises:
        OSError: If it cannot be written; nothing is left behind then.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S")
    copy = path.with_name(f"{path.name}.backup-{stamp}-{secrets.token_hex(2)}")
    _create(copy, raw, like=path)
    return copy


def replace_file(path: Path, raw: bytes, expected: str) -> None:
    """Replace a file in one step, keeping its mode and owner.

    Args:
        path (Path): The file, not a symbolic link; it may be missing.
        raw (bytes): The new content.
        expected (str): The `digest` that the file must still have.
    Raises:
        ValueError: If the file has changed meanwhile; it is left alone then.
        OSError: If it cannot be written; the old file is still there whole then.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
    _create(temporary, raw, like=path)
    try:
        if digest(read_bytes(path)) != expected:
            raise ValueError(f"{path}: another program changed it meanwhile; nothing written")
        os.replace(temporary, path)
    except (OSError, ValueError):
        temporary.unlink(missing_ok=True)
        raise
    # The new file is in place; a file system that cannot flush folders is no reason to fail.
    with contextlib.suppress(OSError):
        _flush_folder(path.parent)


def _create(path: Path, raw: bytes, like: Path) -> None:
    """Write a new file through to the disk, with the mode and owner of another if that exists."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        try:
            _copy_owner(descriptor, like)
            view = memoryview(raw)
            while view:
                view = view[os.write(descriptor, view) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError:
        path.unlink(missing_ok=True)
        raise


def _copy_owner(descriptor: int, like: Path) -> None:
    try:
        wanted = os.stat(like)
    except FileNotFoundError:
        return
    mine = os.fstat(descriptor)
    if (mine.st_uid, mine.st_gid) != (wanted.st_uid, wanted.st_gid):
        os.fchown(descriptor, wanted.st_uid, wanted.st_gid)
    os.fchmod(descriptor, wanted.st_mode & 0o7777)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
