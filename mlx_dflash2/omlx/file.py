"""Put the settings of one model into oMLX's file, and take them out again."""

import codecs
import contextlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .change import Entry, SettingsChange, plan_disable, plan_export
from .store import create_file, replace_file

SETTINGS_NAME = "model_settings.json"
_KEPT_BACKUPS = 10


class SettingsFile(NamedTuple):
    """A settings file as it was read; ``raw`` is None where there is no file yet."""

    path: Path
    raw: bytes | None
    document: dict[str, Any]
    models: dict[str, Entry]


def merge_settings(
    path: str | Path, settings: Mapping[str, Any], *, write: bool = False, **options: Any
) -> SettingsChange:
    """Merge the settings of one model into a settings file.

    Args:
        path (Path): ``model_settings.json`` of a stopped oMLX.
        settings (dict): A document as from :func:`model_settings`.
        write (bool): Write the file, after a backup and an undo record. Default: ``False``.
        unset (collection): Keys to remove from the model's entry.
        turn_off (collection): Switches to turn off that cannot be on beside DFlash, such as MTP.
        undo_dir (Path, optional): Where records are kept. Default: ``~/.mlx_dflash2/omlx``.

    Raises:
        ValueError: If the file must not be edited, or oMLX would not run DFlash from it.
        OSError: If a file cannot be read or written.
    """
    file = read_settings(Path(path))
    change = plan_export(str(file.path), file.models, settings, **options)
    if write:
        write_change(file, change)
    return change


def disable_settings(
    path: str | Path, model_id: str, *, write: bool = False, **options: Any
) -> SettingsChange:
    """Switch DFlash off for a model in a settings file, and give back what exports changed.

    Args:
        path, write, undo_dir: As for :func:`merge_settings`.
        model_id (str): The model.
        off_only (bool): Keep the other DFlash keys, which do nothing while DFlash is off.

    Raises:
        ValueError, OSError: As for :func:`merge_settings`.
    """
    file = read_settings(Path(path))
    change = plan_disable(str(file.path), file.models, model_id, **options)
    if write:
        write_change(file, change)
    return change


def write_change(file: SettingsFile, change: SettingsChange) -> Path | None:
    """Write a planned change, and return the backup of the file that was there.

    If the file has changed since, or something cannot be written, the old file is still there
    whole, and neither backup nor record is left.
    """
    if change.empty:
        return None
    merged = {**file.models, change.model_id: change.after}
    models = {name: entry for name, entry in merged.items() if entry is not None}
    seconds, rest = divmod(time.time_ns(), 10**9)
    stamp = f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(seconds))}-{rest:09d}"
    backup = file.path.with_name(f"{file.path.name}.backup-{stamp}")
    with change.recorded():
        if file.raw is not None:
            create_file(backup, file.raw, like=file.path)
        try:
            raw = dump_document({**file.document, "models": models})
            replace_file(file.path, raw, file.raw)
        except (OSError, ValueError):
            backup.unlink(missing_ok=True)
            raise
    pattern = f"{file.path.name}.backup-" + "[0-9]" * 8 + "-" + "[0-9]" * 6 + "-*"
    for old in sorted(file.path.parent.glob(pattern))[:-_KEPT_BACKUPS]:
        # The settings are written by now: an old copy that stays is not an error.
        with contextlib.suppress(OSError):
            old.unlink()
    return backup if file.raw is not None else None


def read_settings(path: Path) -> SettingsFile:
    """Read a settings file, or the one that a symbolic link leads to."""
    real = Path(os.path.realpath(path))
    raw = real.read_bytes() if real.exists() else None
    if raw is None and not real.parent.is_dir():
        raise FileNotFoundError(f"{real.parent}: no such folder; start oMLX once to create it")
    try:
        empty = b'{"version": 1, "models": {}}'
        document = parse_document(empty if raw is None else raw)
        return SettingsFile(real, raw, document, document["models"])
    except ValueError as error:
        raise ValueError(f"{real}: {error}; left untouched") from None


def parse_document(raw: bytes) -> dict[str, Any]:
    """Decode a settings document, refusing what oMLX would not read as it was meant."""
    if raw.startswith((codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError("found a byte order mark, with which oMLX reads no settings at all")
    try:
        document = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
        dump_document(document)  # NaN, and numbers such as 1e999, are not JSON
    except RecursionError:
        raise ValueError("found nesting too deep to read, allowed: JSON") from None
    except ValueError as error:
        raise ValueError(f"found text that cannot be read ({error}), allowed: UTF-8 JSON") from None
    _check_object("document", document)
    if json.dumps(document.get("version")) != "1":
        raise ValueError(f"version: found {json.dumps(document.get('version'))}, allowed: 1")
    _check_object("models", document.get("models"))
    for model_id, entry in document["models"].items():
        # One entry that is not an object makes oMLX forget the settings of every model.
        _check_object(f"models[{model_id!r}]", entry)
    return document


def dump_document(document: Any) -> bytes:
    """Encode a document as oMLX does: two spaces, text unescaped, no newline at the end."""
    text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:  # half a surrogate pair can only be written as an escape
        return json.dumps(document, indent=2, allow_nan=False).encode("ascii")


def _check_object(name: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{name}: found {json.dumps(value)[:40]}, allowed: an object")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if len(set(keys)) < len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"found {twice!r} twice in one object, allowed: each key once")
    return dict(pairs)
