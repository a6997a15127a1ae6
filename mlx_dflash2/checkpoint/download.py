"""What a download of a model will take, known before it begins."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from .files import Source


@dataclass(frozen=True)
class Download:
    """A download that has not begun.

    Attributes:
        name (str): The repository.
        num_bytes (int): Bytes that are not in the hub's cache yet.
        num_files (int): Files that are not there yet.
        free (int): Bytes that are free where the cache is.
    """

    name: str
    num_bytes: int
    num_files: int
    free: int

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.num_bytes / 1e9:.2f} GB to download in {self.num_files} files, "
            f"{self.free / 1e9:.1f} GB of disk are free."
        )


def pending_download(source: Source, files: Sequence[str]) -> Download | None:
    """Ask the hub how much of a model is still to be downloaded; nothing is downloaded.

    Args:
        source (Source): The model.
        files (sequence of str): Patterns of its files.

    Returns:
        Download: ``None`` if the model is a local folder, all of it is in the cache, or the hub
        cannot tell.

    Raises:
        OSError: if the disk is too small.
    """
    if Path(source.name).expanduser().is_dir():
        return None
    try:
        found = snapshot_download(
            source.name, revision=source.revision, allow_patterns=list(files), dry_run=True
        )
    except (HfHubHTTPError, LocalEntryNotFoundError):
        return None
    missing = [file.file_size or 0 for file in found if file.will_download]
    if not missing:
        return None
    place = _existing(Path(constants.HF_HUB_CACHE))
    download = Download(source.name, sum(missing), len(missing), shutil.disk_usage(place).free)
    if download.num_bytes > download.free:
        raise OSError(f"The disk of {place} is too small. {download}")
    return download


def _existing(folder: Path) -> Path:
    while not folder.exists():
        folder = folder.parent
    return folder
