"""Put the settings of one model into oMLX's file, and take them out again."""

import difflib
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .document import EMPTY_TEXT, edit_entry, parse_document
from .entry import CONFLICTS, entry_problems, entry_warnings, keys_to_remove
from .settings import single_entry
from .store import back_up, digest, read_bytes, replace_file
from .undo import Changed, extend_record, give_back, load_record, same, save_record

SETTINGS_NAME = "model_settings.json"


@dataclass(frozen=True)
class Change:
    """A change to a settings file, planned or written."""

    path: Path
    model_id: str
    before: bytes | None
    after: bytes
    record: Changed
    warnings: tuple[str, ...] = ()
    written: bool = False
    backup: Path | None = None

    @property
    def empty(self) -> bool:
        """Whether the file already says what it should."""
        return self.before == self.after

    @property
    def diff(self) -> str:
        """The change as a unified diff; empty if there is none."""
        old = self.before.decode("utf-8").split("\n") if self.before is not None else []
        new = self.after.decode("utf-8").split("\n")
        lines = difflib.unified_diff(old, new, str(self.path), str(self.path), lineterm="")
        return "\n".join(lines)


def read_settings(
    path: Path, model_id: str | None = None
) -> tuple[Path, bytes | None, str, dict[str, Any]]:
    """Read a settings file; a missing one counts as an empty document.

    Args:
        path (Path): The file, or a symbolic link to it.
        model_id (str, optional): A model whose entry is to be edited.
    Returns:
        tuple: The real path, the bytes (None if missing), the text and the document.
    Raises:
        ValueError: If the file is not one that may be edited.
        OSError: If it cannot be read, or its folder is missing.
    """
    real = Path(os.path.realpath(path))
    raw = read_bytes(real)
    if raw is None and not real.parent.is_dir():
        raise FileNotFoundError(f"{real.parent}: no such folder; start oMLX once to create it")
    try:
        text, data = parse_document(EMPTY_TEXT.encode() if raw is None else raw, model_id)
    except ValueError as error:
        raise ValueError(f"{real}: {error}; left untouched") from None
    return real, raw, text, data


def merge_settings(
    path: str | Path,
    settings: Mapping[str, Any],
    *,
    unset: Collection[str] = (),
    replace_mtp: bool = False,
    known: Collection[str] | None = None,
    write: bool = False,
    undo_dir: Path | None = None,
) -> Change:
    """Merge the settings of one model into a settings file.

    Args:
        path (Path): ``model_settings.json`` of a stopped oMLX.
        settings (dict): A document as from `model_settings`.
        unset (collection): Keys to remove from the model's entry.
        replace_mtp (bool): Turn MTP off where it is on. Default: ``False``.
        known (collection, optional): All keys that this oMLX knows, for the warnings.
        write (bool): Write the file, after a backup and an undo record. Default: ``False``.
        undo_dir (Path, optional): Where undo records are kept. Default: ``~/.mlx_dflash2/omlx``.
    Returns:
        Change: What changes; `write=True` and nothing to change writes nothing.
    Raises:
        ValueError: If the file must not be edited, or oMLX would not run DFlash from it.
        OSError: If the file cannot be read or written.
    """
    model_id, ours = single_entry(settings)
    real, raw, text, data = read_settings(Path(path), model_id)
    entry = data["models"].get(model_id, {})
    remove = keys_to_remove(unset, ours, entry)
    merged = {k: v for k, v in entry.items() if k not in remove} | ours
    check_mtp(entry, ours, replace_mtp)
    if problems := entry_problems(merged):
        raise ValueError(f"models[{model_id!r}]: {problems[0]}")
    values = {k: v for k, v in ours.items() if k not in entry or not same(v, entry[k])}
    after = edit_entry(text, model_id, values, remove)
    _check_edit(after, data, model_id, merged)
    record = load_record(str(real), model_id, undo_dir)
    models = data["models"] | {model_id: merged}
    change = Change(
        path=real,
        model_id=model_id,
        before=raw,
        after=after.encode("utf-8"),
        record=extend_record(record, entry, merged),
        warnings=tuple(entry_warnings(models, model_id, known) + _top_level(data)),
    )
    return write_change(change, undo_dir) if write and not change.empty else change


def disable_settings(
    path: str | Path,
    model_id: str,
    *,
    off_only: bool = False,
    write: bool = False,
    undo_dir: Path | None = None,
) -> Change:
    """Switch DFlash off for one model and give back what exports changed.

    Args:
        path (Path): ``model_settings.json`` of a stopped oMLX.
        model_id (str): The model.
        off_only (bool): Keep the other DFlash keys, which do nothing while DFlash is off, so
            that it can be switched on again. Default: ``False``.
        write (bool): Write the file. Default: ``False``.
        undo_dir (Path, optional): Where undo records are kept. Default: ``~/.mlx_dflash2/omlx``.
    Returns:
        Change: What changes.
    Raises:
        ValueError: If the file must not be edited.
        OSError: If the file cannot be read or written.
    """
    real, raw, text, data = read_settings(Path(path), model_id)
    base = EMPTY_TEXT.encode() if raw is None else raw
    entry = data["models"].get(model_id)
    if entry is None:
        return Change(real, model_id, base, base, {}, ("the file has no such model",))
    record = load_record(str(real), model_id, undo_dir)
    values, remove, notes = plan_disable(record, entry, off_only)
    after = edit_entry(text, model_id, values, remove)
    restored = {k: v for k, v in entry.items() if k not in remove} | values
    _check_edit(after, data, model_id, None if remove and not restored else restored)
    change = Change(
        path=real,
        model_id=model_id,
        before=base,
        after=after.encode("utf-8"),
        record=record if off_only else {},
        warnings=tuple(notes),
    )
    return write_change(change, undo_dir) if write and not change.empty else change


def write_change(change: Change, undo_dir: Path | None = None) -> Change:
    """Write a planned change: undo record, backup, new file.

    Args:
        change (Change): As planned; the file must not have changed since.
        undo_dir (Path, optional): Where undo records are kept. Default: ``~/.mlx_dflash2/omlx``.
    Returns:
        Change: The change, now written.
    Raises:
        ValueError: If the file has changed since.
        OSError: If something cannot be written; the old file is still there whole then.
    """
    place = str(change.path)
    # A record is on disk before what it undoes, and goes only after that has gone: whatever
    # happens in between, what is in the file can be given back.
    if change.record:
        save_record(place, change.model_id, change.record, undo_dir)
    backup = back_up(change.path, change.before) if change.before is not None else None
    replace_file(change.path, change.after, digest(change.before))
    if not change.record:
        save_record(place, change.model_id, {}, undo_dir)
    return replace(change, written=True, backup=backup)


def plan_disable(
    record: Changed, entry: Mapping[str, Any], off_only: bool = False
) -> tuple[dict[str, Any], list[str], list[str]]:
    """Work out what `disable` does to one model's settings.

    Args:
        record (dict): What exports changed, as from `load_record`.
        entry (dict): The settings now.
        off_only (bool): Change only the switch, and give MTP back.
    Returns:
        tuple: Values to set, keys to remove, and notes for the user.
    """
    values, remove, kept = give_back(record, entry)
    if off_only or not record:
        values = {k: v for k, v in values.items() if k in CONFLICTS}
        remove, kept = [], []
        if entry.get("dflash_enabled"):
            values["dflash_enabled"] = False
    notes = [f"{key}: changed since the export, left as it is" for key in kept]
    if not record and "dflash_enabled" in values:
        notes.append("no undo record: only dflash_enabled is switched off")
    if "dflash_enabled" not in remove and ({**entry} | values).get("dflash_enabled"):
        notes.append("DFlash was on before the export and is again; --off-only switches it off")
    return values, remove, notes


def check_mtp(entry: Mapping[str, Any], ours: Mapping[str, Any], replace_mtp: bool) -> None:
    """Refuse to turn MTP off unless that was asked for.

    Args:
        entry (dict): The model's settings now.
        ours (dict): The settings to merge.
        replace_mtp (bool): Whether the user agreed.
    Raises:
        ValueError: If MTP is on and would have to go.
    """
    for key in CONFLICTS:
        if entry.get(key) and ours.get("dflash_enabled") and not replace_mtp:
            raise ValueError(
                f"{key}: found {json.dumps(entry[key])}, allowed: false beside dflash_enabled; "
                "--replace-mtp turns it off, and `disable` gives it back"
            )


def _check_edit(
    after: str, data: Mapping[str, Any], model_id: str, entry: Mapping[str, Any] | None
) -> None:
    """Read the edited text back: all of it must mean what it meant, but for the one entry."""
    models = {k: v for k, v in data["models"].items() if k != model_id or entry is not None}
    if entry is not None:
        models[model_id] = entry
    wanted = {**data, "models": models}
    _, found = parse_document(after.encode("utf-8"))
    if json.dumps(found, sort_keys=True) != json.dumps(wanted, sort_keys=True):
        raise ValueError("the edited settings do not read back as meant; nothing written")
    if list(found) != list(wanted) or list(found["models"]) != list(models):
        raise ValueError("the edited settings changed their order; nothing written")


def _top_level(data: Mapping[str, Any]) -> list[str]:
    names = [repr(key) for key in data if key not in ("version", "models")]
    if not names:
        return []
    return [f"unknown top-level keys {', '.join(names)}: oMLX deletes them at its next save"]
