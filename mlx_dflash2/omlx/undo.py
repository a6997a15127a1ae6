"""What an export changed, kept outside oMLX's files so that it can be given back."""

import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .store import digest, read_bytes, replace_file

# A record maps each changed key to {"before": ..., "after": ...}; "before" is missing where the
# key was, so that null and no key stay different things.
Changed = dict[str, dict[str, Any]]


def default_undo_dir() -> Path:
    """The folder of the undo records: ``~/.mlx_dflash2/omlx``."""
    return Path.home() / ".mlx_dflash2" / "omlx"


def same(left: Any, right: Any) -> bool:
    """Whether two JSON values are the same, 1 and true and 1.0 being different."""
    return json.dumps(left) == json.dumps(right)


def load_record(place: str, model_id: str, undo_dir: Path | None = None) -> Changed:
    """Read what earlier exports changed for one model.

    Args:
        place (str): The settings file or the server that was changed.
        model_id (str): The model.
        undo_dir (Path, optional): The folder of the records.
    Returns:
        dict: The changed keys; empty if there is no record.
    Raises:
        ValueError: If the record cannot be read.
    """
    path = _record_path(place, undo_dir)
    return _load(path)[1].get("models", {}).get(model_id, {})


def save_record(
    place: str, model_id: str, changed: Mapping[str, Any], undo_dir: Path | None = None
) -> Path:
    """Write what exports have changed for one model; nothing changed removes the model.

    Args:
        place (str): The settings file or the server.
        model_id (str): The model.
        changed (dict): As from `extend_record`, or empty.
        undo_dir (Path, optional): The folder of the records.
    Returns:
        Path: The record.
    Raises:
        OSError: If it cannot be written.
        ValueError: If an existing record cannot be read.
    """
    path = _record_path(place, undo_dir)
    raw, record = _load(path)
    if raw is None and not changed:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    models = record.get("models", {})
    if changed:
        models[model_id] = dict(changed)
    else:
        models.pop(model_id, None)
    record = {"place": place, "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "models": models}
    text = json.dumps(record, indent=2) + "\n"
    replace_file(path, text.encode("utf-8"), digest(raw))
    return path


def extend_record(record: Changed, before: Mapping[str, Any], after: Mapping[str, Any]) -> Changed:
    """Add a change to a record, keeping the values from before the first export.

    Args:
        record (dict): What earlier exports changed.
        before (dict): The model's entry now.
        after (dict): The entry that will replace it.
    Returns:
        dict: The record that undoes both.
    """
    result = {}
    for key in [*record, *(k for k in (*before, *after) if k not in record)]:
        change: dict[str, Any] = {}
        # An earlier value counts only while ours is in force: a record may outlive its write.
        source = before
        if key in record and _in_force(record[key], before, key):
            source = {key: record[key]["before"]} if "before" in record[key] else {}
        if key in source:
            change["before"] = source[key]
        if key in after:
            change["after"] = after[key]
        if _differs(change):
            result[key] = change
    return result


def give_back(
    record: Changed, entry: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str], list[str]]:
    """Work out how to undo a record.

    Args:
        record (dict): What exports changed.
        entry (dict): The model's entry now.
    Returns:
        tuple: Values to set, keys to remove, and keys left alone because someone else has
        changed them since.
    """
    values, remove, kept = {}, [], []
    for key, change in record.items():
        if not _in_force(change, entry, key):
            if key in entry:
                kept.append(key)
        elif "before" in change:
            values[key] = change["before"]
        else:
            remove.append(key)
    return values, remove, kept


def _in_force(change: Mapping[str, Any], entry: Mapping[str, Any], key: str) -> bool:
    if "after" not in change:
        return key not in entry
    return key in entry and same(entry[key], change["after"])


def _differs(change: Mapping[str, Any]) -> bool:
    if "before" in change and "after" in change:
        return not same(change["before"], change["after"])
    return bool(change)


def _record_path(place: str, undo_dir: Path | None) -> Path:
    name = hashlib.sha256(place.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    return (undo_dir or default_undo_dir()) / f"{name}.json"


def _load(path: Path) -> tuple[bytes | None, dict[str, Any]]:
    raw = read_bytes(path)
    if raw is None:
        return None, {}
    try:
        record = json.loads(raw)
    except ValueError as error:
        raise ValueError(f"undo record {path}: cannot be read ({error})") from None
    if not isinstance(record, dict) or not isinstance(record.get("models"), dict):
        raise ValueError(f"undo record {path}: is not one that this program wrote")
    return raw, record
