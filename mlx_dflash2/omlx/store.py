"""Files that are replaced whole or not at all."""

import contextlib
import os
import secrets
from pathlib import Path


def replace_file(path: Path, raw: bytes, expected: bytes | None) -> None:
    """Replace a file in one step if it still holds what is expected, None if there was none.

    Its mode and owner stay. Whatever fails, the old file is still there whole.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
    create_file(temporary, raw, like=path)
    try:
        if (path.read_bytes() if path.exists() else None) != expected:
            raise ValueError(f"{path}: another program changed it meanwhile; nothing written")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    # The new file is in place; a file system that cannot flush folders is no reason to fail.
    with contextlib.suppress(OSError):
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def create_file(path: Path, raw: bytes, like: Path) -> None:
    """Write a new file through to the disk, with the mode and owner of another if that exists."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with open(descriptor, "wb") as stream:
            with contextlib.suppress(FileNotFoundError):
                wanted, mine = os.stat(like), os.fstat(descriptor)
                if (mine.st_uid, mine.st_gid) != (wanted.st_uid, wanted.st_gid):
                    os.fchown(descriptor, wanted.st_uid, wanted.st_gid)
                os.fchmod(descriptor, wanted.st_mode & 0o7777)
            stream.write(raw)
            stream.flush()
            os.fsync(descriptor)
    except OSError as error:
        path.unlink(missing_ok=True)
        # What fails on a descriptor does not name the file.
        raise OSError(error.errno, error.strerror, str(like)) from None
