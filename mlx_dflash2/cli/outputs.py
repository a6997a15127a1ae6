"""Places to write to: what would fail at the end of a command is refused at its start."""

import shutil
from pathlib import Path
from tempfile import TemporaryFile


def user_path(text: str) -> Path:
    """Parse an argument that names a file or a folder; ``~`` is the home folder."""
    return Path(text).expanduser()


def check_file(path: Path, what: str, replaced: bool = False) -> None:
    """Check that a file can be written; nothing is changed.

    Args:
        path (Path): The file.
        what (str): What names it, such as its flag.
        replaced (bool): Whether it is written beside itself first. Default: ``False``.

    Raises:
        OSError: in one line, naming the file.
    """
    path = path.absolute()
    if path.is_dir():
        raise IsADirectoryError(f"{what}: {path} is a folder.")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{what}: there is no folder {path.parent}.")
    try:
        if path.exists():
            open(path, "ab").close()
        if replaced or not path.exists():
            TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise OSError(f"{what}: {path} cannot be written: {error.strerror}.") from error


def check_folder(path: Path, what: str, size: int = 0) -> None:
    """Check that a folder can be written to, or made; nothing is changed.

    Args:
        path (Path): The folder.
        what (str): What names it, such as its flag.
        size (int): Bytes that will be written. Default: ``0``.

    Raises:
        OSError: in one line, naming the folder.
    """
    place = path.absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        raise NotADirectoryError(f"{what}: {place} is not a folder.")
    try:
        TemporaryFile(dir=place).close()
    except OSError as error:
        raise OSError(f"{what}: {place} cannot be written to: {error.strerror}.") from error
    if size > (free := shutil.disk_usage(place).free):
        raise OSError(
            f"{what}: {path} needs {size / 1e9:.2f} GB but {place} has {free / 1e9:.2f} GB free."
        )
