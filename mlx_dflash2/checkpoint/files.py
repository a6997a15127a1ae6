"""Find checkpoint folders, on disk or on the hub, and read their configs, headers and weights."""

import json
import struct
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard, cast

import mlx.core as mx
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

# mlx-lm's own, so that drafters come from the same hub as targets.
from mlx_lm.utils import snapshot_download

from ..reading import reading

CONFIG_FILES = ("config.json",)
DRAFTER_FILES = ("*.json", "*.safetensors")
INDEX = "model.safetensors.index.json"


class TensorHeader(NamedTuple):
    """Dtype, such as ``BF16``, and shape of one tensor, as a safetensors header states them."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Source:
    """A model of which only config.json has been fetched and read.

    Attributes:
        name (str): Its folder or repository, as it was given.
        revision (str, optional): Revision of the repository, its commit if that is known.
        folder (Path): Where config.json is.
        config (dict): Content of config.json.
    """

    name: str
    revision: str | None
    folder: Path
    config: dict[str, Any]

    def fetch(self, files: Sequence[str]) -> Path:
        """Return the folder with all files of some patterns, as :func:`resolve`."""
        return resolve(self.name, self.revision, files)


def find_source(path_or_hf_repo: str | Path, revision: str | None = None) -> Source:
    """Fetch and read a model's config.json, and nothing else.

    Args:
        path_or_hf_repo (str or Path): A folder, or a repository of the Hugging Face hub.
        revision (str, optional): Revision of the repository. Default: ``None``.

    Raises:
        FileNotFoundError, NotADirectoryError, ValueError: as :func:`resolve` and
            :func:`read_config`.
    """
    folder = resolve(path_or_hf_repo, revision, CONFIG_FILES)
    # The hub's cache has a folder for each commit. Naming the commit spares a look-up at the hub,
    # and keeps weights of a later commit from being read with this config.
    if folder.parent.name == "snapshots":
        revision = folder.name
    return Source(str(path_or_hf_repo), revision, folder, read_config(folder))


def resolve(
    path_or_hf_repo: str | Path,
    revision: str | None = None,
    files: Sequence[str] = DRAFTER_FILES,
) -> Path:
    """Return the folder of a checkpoint, downloading its files from the hub where needed.

    Args:
        path_or_hf_repo (str or Path): A folder, or a repository of the Hugging Face hub.
        revision (str, optional): Revision of the repository. Default: ``None``.
        files (sequence of str): Patterns of the files to download. Default: a drafter's.

    Raises:
        FileNotFoundError: if neither the disk nor the hub has it.
        NotADirectoryError: if the path is a file.
    """
    if not isinstance(path_or_hf_repo, str | Path):
        kind = type(path_or_hf_repo).__name__
        raise TypeError(f"A folder or a repository is needed, not a {kind}.")
    path = Path(path_or_hf_repo).expanduser()
    # An empty name would be the working directory.
    if path.is_dir() and str(path_or_hf_repo):
        return path
    if path.is_file():
        raise NotADirectoryError(f"{path} is a file; give the folder that holds config.json.")
    try:
        return Path(
            snapshot_download(str(path_or_hf_repo), revision=revision, allow_patterns=list(files))
        )
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        if isinstance(error, LocalEntryNotFoundError):
            cached = _cached(str(path_or_hf_repo), revision, files)
            if cached is not None:
                return cached
        raise FileNotFoundError(
            f"{str(path_or_hf_repo)!r} is neither a local folder nor a repository that the hub or "
            f"its cache could give: {_why_not(error)} ({type(error).__name__})."
        ) from error


def _cached(repo: str, revision: str | None, files: Sequence[str]) -> Path | None:
    """Find what the hub's cache has of a repository, and warn of files that it lacks.

    Whether one of these is needed shows when the files are read: a repository lists many others.
    """
    try:
        return Path(
            snapshot_download(
                repo, revision=revision, allow_patterns=list(files), local_files_only=True
            )
        )
    except LocalEntryNotFoundError as error:
        folder = getattr(error, "snapshot_path", None)
        if folder is None:
            return None
        warnings.warn(f"{str(error).partition('). ')[0]}).", stacklevel=4)
        return Path(folder)


def _why_not(error: Exception) -> str:
    if isinstance(error, HFValidationError):
        return "it is not a repository's name"
    if isinstance(error, LocalEntryNotFoundError):
        return "it is not in the cache, and the hub cannot be reached"
    if isinstance(error, GatedRepoError):
        return "its license has to be accepted first, at its page on huggingface.co"
    if isinstance(error, RevisionNotFoundError):
        return "it does not have this revision"
    if isinstance(error, RepositoryNotFoundError):
        return "the hub does not have it, or it is private"
    return "the hub refused it"


def read_config(folder: Path) -> dict[str, Any]:
    """Read the config.json of a folder.

    Raises:
        FileNotFoundError: if it is not there.
        ValueError: if it is not a JSON object.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no config.json: it is not a model folder.")
    return _read_object(path)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        # Some editors put a byte order mark first.
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a JSON {type(value).__name__}, not an object.")
    return value


def weight_files(folder: Path, pattern: str = "*.safetensors", merged: bool = False) -> list[Path]:
    """List the safetensors files of a complete checkpoint.

    An index decides which files belong to it, and files beside them are warned of. If none of
    the files that it names exists, the index is left over from another sharding: it is ignored
    with a warning, and all files that match the pattern belong to the checkpoint.

    Args:
        folder (Path): The checkpoint's folder.
        pattern (str): What its files are called.
        merged (bool): Whether all files of the pattern are read, as mlx-lm does. Default:
            ``False``.

    Raises:
        FileNotFoundError: if there are no weights, or some of the index's files are missing.
        ValueError: if the index is malformed.
    """
    # macOS writes extended attributes into files named `._…` on file systems without them.
    found = sorted(file for file in folder.glob(pattern) if not file.name.startswith("."))
    names = sorted(set(_weight_map(folder).values()))
    missing = [name for name in names if not (folder / name).is_file()]
    # The hub's cache holds links; the file behind one may be deleted or was never downloaded.
    dangling = [file.name for file in found if not file.is_file()]
    if names and not missing:
        beside = [file for file in found if file.name not in names and file.is_file()]
        if beside:
            fate = "read, too" if merged else "ignored"
            _warn(f"{folder / INDEX} does not name {beside[0].name}; it is {fate}.")
        return [folder / name for name in names] + (beside if merged else [])
    if dangling or (missing and len(missing) < len(names)):
        lost = ", ".join(dict.fromkeys(missing + dangling))
        raise FileNotFoundError(f"Incomplete download: {folder} lacks {lost}.")
    if not found:
        partial = sorted(file.name for file in folder.glob("*.incomplete"))
        about = f"only {', '.join(partial)}" if partial else f"no {pattern} file"
        raise FileNotFoundError(f"{folder} has a config.json but {about}: it has no weights.")
    if names:
        _warn(
            f"{folder} has an index of other files, such as {names[0]}, none of which is there; "
            "it is ignored."
        )
    return found


def _warn(text: str) -> None:
    # Beyond the functions that read the weights, and the public one that calls them.
    warnings.warn(text, stacklevel=5)


def _weight_map(folder: Path) -> dict[str, str]:
    """Return the file of every tensor, as a folder's index tells; empty if there is none."""
    index = folder / INDEX
    if not index.is_file():
        return {}
    found = _read_object(index).get("weight_map")
    known = found if _is_text_map(found) else {}
    if not known or not all(name.endswith(".safetensors") for name in known.values()):
        raise ValueError(f"{index} has no `weight_map` from tensors to .safetensors files.")
    return known


def _is_text_map(value: Any) -> TypeGuard[dict[str, str]]:
    return isinstance(value, dict) and all(isinstance(name, str) for name in value.values())


def read_header(file: Path) -> dict[str, TensorHeader]:
    """Read dtype and shape of every tensor of a safetensors file, but no tensor.

    Raises:
        ValueError: if the file is truncated or is not safetensors.
    """
    size = file.stat().st_size
    with open(file, "rb") as stream:
        length = struct.unpack("<Q", stream.read(8))[0] if size >= 8 else size
        if length > size - 8:
            raise ValueError(f"{file} is truncated or is not a safetensors file: {size} bytes.")
        try:
            header = json.loads(stream.read(length))
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"{file} has no valid safetensors header.") from error
    # MLX writes null where there are none.
    metadata = header.pop("__metadata__", None) or {} if isinstance(header, dict) else None
    if not _is_text_map(metadata) or not all(map(_is_tensor, header.values())):
        raise ValueError(f"{file} has no valid safetensors header.")
    end = max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    if 8 + length + end > size:
        raise ValueError(f"{file} is truncated: it has {size} of {8 + length + end} bytes.")
    return {name: TensorHeader(t["dtype"], tuple(t["shape"])) for name, t in header.items()}


def _is_tensor(entry: Any) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        return False
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
        return False
    return all(type(n) is int and n >= 0 for n in shape + offsets)


def read_headers(files: Iterable[Path]) -> dict[str, TensorHeader]:
    """Read dtype and shape of every tensor of a checkpoint, but no tensor.

    Raises:
        ValueError: if a file is damaged, two files hold the same tensor, or an index beside
            them names a tensor that its file does not hold.
    """
    tensors: dict[str, TensorHeader] = {}
    places: dict[str, str] = {}
    files = list(files)
    for file in files:
        for name, header in read_header(file).items():
            if name in tensors:
                raise ValueError(
                    f"{file.parent} holds `{name}` twice, in {places[name]} and in {file.name}."
                )
            tensors[name], places[name] = header, file.name
    names = {file.name for file in files}
    for folder in {file.parent for file in files}:
        for name, place in _weight_map(folder).items():
            if place in names and places.get(name) != place:
                raise ValueError(f"{folder / INDEX} says `{name}` is in {place}, but it is not.")
    return tensors


def read_weights(files: Iterable[Path]) -> dict[str, mx.array]:
    """Map the tensors of a checkpoint's files by name; each is read when it is first used."""
    weights: dict[str, mx.array] = {}
    for file in files:
        with reading(file):
            weights |= cast(dict[str, mx.array], mx.load(str(file)))
    return weights
