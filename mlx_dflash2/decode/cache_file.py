"""Files of saved prompt caches: mlx-lm's format, with a drafter's context behind the caches."""

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_unflatten
from mlx_lm.models import cache as mlx_lm_caches
from mlx_lm.models.cache import save_prompt_cache

from ..reading import reading

# Name of our own entry among the file's metadata.
_METADATA = "mlx_dflash2"
# What it holds.
_OWN = ("tokens", "model", "drafter", "offset")


@dataclass(frozen=True)
class CacheFile:
    """Content of a file of saved prompt caches; arrays are read when they are first used.

    Attributes:
        caches (list): The target's caches, one a layer.
        metadata (dict): Texts by name; mlx_lm.generate expects ``model`` and
            ``tokenizer_config``.
        tokens (list of int): The tokens that the caches cover; empty if not known.
        model (str, optional): Fingerprint of the target; ``None`` in mlx-lm's own files.
        drafter (str, optional): Fingerprint of the drafter.
        offset (int): Absolute position behind the drafter's context.
        context (list of mx.array): The drafter's context: keys, then values, of each layer.
    """

    caches: list[Any]
    metadata: dict[str, str]
    tokens: list[int] = field(default_factory=list)
    model: str | None = None
    drafter: str | None = None
    offset: int = 0
    context: Sequence[mx.array] = ()


def write_cache_file(file: str | Path, content: CacheFile) -> None:
    """Write a file that mlx-lm can read too; a reader meets the old file or the whole new one.

    Args:
        file (str or Path): A ``.safetensors`` file.
        content (CacheFile): The content.
    """
    file = Path(file).expanduser()
    own = {name: getattr(content, name) for name in _OWN}
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        caches, whole = (str(Path(folder) / f"{name}.safetensors") for name in ("caches", "whole"))
        save_prompt_cache(caches, content.caches, content.metadata)
        arrays, flat = _load(caches)
        # Behind the caches: mlx-lm reads as many entries as there are cache classes.
        behind = len(content.caches)
        arrays |= {f"{behind}.{i}": array for i, array in enumerate(content.context)}
        own["digest"] = _digest(arrays, flat, own)
        # The caller's metadata come first.
        mx.save_safetensors(whole, arrays, flat | {f"0.{_METADATA}": json.dumps(own)})
        os.replace(whole, file)


def read_cache_file(file: str | Path) -> CacheFile:
    """Read a file that :func:`write_cache_file` or mlx-lm has written.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is not a prompt cache.
    """
    file = Path(file).expanduser()
    if not file.is_file():
        raise FileNotFoundError(f"There is no prompt cache {file}.")
    with reading(file, "is not a prompt cache"):
        return _content(*_load(str(file)))


def _content(arrays: dict[str, mx.array], flat: dict[str, str]) -> CacheFile:
    # The caller's metadata, the caches' classes, and the kinds of values that are not arrays.
    parts = tree_unflatten(list(flat.items()))
    if not isinstance(parts, list) or len(parts) != 3:
        raise ValueError("it has other metadata.")
    metadata, classes, kinds = parts
    own = json.loads(metadata.pop(_METADATA, "{}"))
    flat.pop(f"0.{_METADATA}", None)
    if own and own.pop("digest", None) != _digest(arrays, flat, own):
        raise ValueError("its metadata is damaged.")
    values = arrays | {name: _value(arrays[name], kind) for name, kind in kinds[1:]}
    states = tree_unflatten(list(values.items()))
    if len(states) < len(classes):
        raise ValueError(f"it has {len(states)} states for {len(classes)} caches.")
    caches = [
        getattr(mlx_lm_caches, name).from_state(state)
        for name, state in zip(classes, states, strict=False)
    ]
    return CacheFile(caches, metadata, context=_context(arrays, len(caches)), **own)


def _digest(arrays: dict[str, mx.array], flat: dict[str, str], own: dict[str, Any]) -> str:
    """Identify everything in a file but the arrays' numbers."""
    known = sorted(flat.items()), sorted(own.items())
    shapes = [(name, value.shape, str(value.dtype)) for name, value in sorted(arrays.items())]
    return hashlib.sha256(repr((known, shapes)).encode()).hexdigest()


def _load(file: str) -> tuple[dict[str, mx.array], dict[str, str]]:
    return cast(tuple[dict[str, mx.array], dict[str, str]], mx.load(file, return_metadata=True))


def _value(array: mx.array, kind: str) -> Any:
    """Return what mlx-lm has stored as an array."""
    if kind == "string":
        return "".join(map(chr, cast(list[int], array.tolist())))
    return array.item() if kind == "scalar" else None


def _context(arrays: dict[str, mx.array], count: int) -> list[mx.array]:
    """List the arrays behind ``count`` caches."""
    names = (name for name in arrays if name.startswith(f"{count}."))
    return [arrays[name] for name in sorted(names, key=lambda name: int(name.split(".")[1]))]
