"""A checkpoint folder: found offline or on the hub, complete, and only safetensors."""

import json
import struct
from pathlib import Path
from typing import Any

import mlx.core as mx
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

_FILES = ["*.json", "*.safetensors"]


def resolve(path_or_hf_repo: str | Path, revision: str | None = None) -> Path:
    """The folder of a checkpoint: a local one, the hub's cached one, or a fresh download.

    Raises:
        FileNotFoundError: if there is no such folder or repository within reach.
        NotADirectoryError: if the path is a file.
    """
    path = Path(path_or_hf_repo).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise NotADirectoryError(f"{path} is a file; give the folder that holds config.json.")
    try:
        return Path(
            snapshot_download(str(path_or_hf_repo), revision=revision, allow_patterns=_FILES)
        )
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise FileNotFoundError(
            f"{path_or_hf_repo} is neither a local folder nor a repository that the hub or its "
            f"cache could give ({type(error).__name__})."
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json.

    Raises:
        FileNotFoundError: if it is not there.
        ValueError: if it is no JSON object.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no config.json: it is not a model folder.")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds a {type(config).__name__}, not an object.")
    return config


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a complete checkpoint.

    An index decides which files count, unless none of those that it names is there: then it is
    left over from another sharding.

    Raises:
        FileNotFoundError: if there are no weights, or some of the index's files are missing.
    """
    present = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing and len(missing) < len(names):
            raise FileNotFoundError(
                f"Incomplete download: {folder} lacks {', '.join(missing)}, named in its index."
            )
        if not missing:
            return [folder / name for name in names]
    if not present:
        raise FileNotFoundError(f"{folder} has a config.json but no .safetensors file.")
    return present


def read_header(file: Path) -> dict[str, dict[str, Any]]:
    """Name, dtype and shape of every tensor of a safetensors file, without reading the tensors.

    Raises:
        ValueError: if the file is truncated or is not safetensors.
    """
    size = file.stat().st_size
    with open(file, "rb") as stream:
        length = struct.unpack("<Q", stream.read(8))[0] if size >= 8 else size
        if length > size - 8:
            raise ValueError(f"{file} is truncated or is not a safetensors file.")
        try:
            header = json.loads(stream.read(length))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{file} has no valid safetensors header.") from error
    header.pop("__metadata__", None)
    end = max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    if 8 + length + end > size:
        raise ValueError(f"{file} is truncated: {size} bytes of {8 + length + end}.")
    return header


def read_weights(files: list[Path]) -> dict[str, mx.array]:
    """All tensors of a checkpoint's files, lazily loaded."""
    for file in files:
        read_header(file)
    weights = {}
    for file in files:
        weights.update(mx.load(str(file)))
    return weights
