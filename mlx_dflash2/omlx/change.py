"""What an export or its undo makes of one model's settings, in a file or on a server.

What exports changed is kept outside oMLX's files, in one file for each model. A record has the
place, the entry as it was before the first export, and the entry as it was left.
"""

import difflib
import hashlib
import json
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .settings import REMOVABLE, SWITCHES, check_model_id, check_name, refusals, value_problems
from .store import replace_file

Entry = dict[str, Any]
Models = Mapping[str, Entry]
Folder = Path | None
Record = tuple[str, Entry, Entry]


class NotTakenBack(ValueError):
    """A change failed half way, and is still in force."""


@dataclass(frozen=True)
class SettingsChange:
    """A change of one model's settings; an entry is None where the model has none.

    ``original`` is what `disable` gives back afterwards, None for nothing, and ``earlier`` the
    record that this continues.
    """

    place: str
    model_id: str
    before: Entry | None
    after: Entry | None
    original: Entry | None = None
    earlier: Record | None = None
    warnings: tuple[str, ...] = ()
    undo_dir: Folder = None

    @property
    def empty(self) -> bool:
        """Whether the settings are already as they should be."""
        return _same(self.before, self.after)

    @property
    def values(self) -> Entry:
        """The keys that change, null where they go."""
        after = self.after or {}
        return {key: after.get(key) for key in _changed(self.before or {}, after)}

    @property
    def diff(self) -> str:
        """The change as a unified diff; empty if there is none."""
        old, new = (
            json.dumps(entry, indent=2, ensure_ascii=False).splitlines() if entry else []
            for entry in (self.before, self.after)
        )
        name = f"{self.place}: {self.model_id}"
        return "\n".join(difflib.unified_diff(old, new, name, name, lineterm=""))

    @contextmanager
    def recorded(self) -> Generator[None, None, None]:
        """Keep the records up to a change that is made; one that fails leaves those of before.

        A record is on disk before what it undoes, and goes only after that has gone: whatever
        happens in between, what is in force can be given back.
        """
        path = _record_path(self.model_id, self.undo_dir)
        old, new = _read_records(path), []
        if self.original is not None and self.after is not None:
            new = [(self.place, self.original, self.after)]
        _write_records(path, old + new)
        try:
            yield
        except NotTakenBack:
            raise
        except (OSError, ValueError):
            _write_records(path, old)
            raise
        others = [record for record in old if record[0] != self.place and record != self.earlier]
        _write_records(path, others + new)


def plan_export(
    place: str,
    models: Models,
    settings: Mapping[str, Any],
    *,
    unset: Collection[str] = (),
    turn_off: Collection[str] = (),
    undo_dir: Folder = None,
) -> SettingsChange:
    """Plan to merge a document of one model into the settings of all, as `merge_settings`."""
    if len(settings["models"]) != 1:
        raise ValueError(f"models: found {len(settings['models'])} entries to merge, allowed: 1")
    ((model_id, ours),) = settings["models"].items()
    check_model_id(model_id)
    for key in ours:
        check_name("settings key", key, REMOVABLE)
    for key in unset:
        check_name("--unset", key, REMOVABLE - ours.keys())
    for key in turn_off:
        check_name("--turn-off", key, SWITCHES)
    before = models.get(model_id) or {}
    kept = {k: False if v and k in turn_off else v for k, v in before.items() if k not in unset}
    # Ours turn MTP off too, but nobody's setting goes without being asked for.
    asked = {k: v for k, v in ours.items() if k not in SWITCHES or not kept.get(k)}
    after = kept | ours
    if problems := refusals(kept | asked) + value_problems(after):
        raise ValueError(f"models[{model_id!r}]: {problems[0]}")
    earlier = _find_record(place, model_id, before, undo_dir)
    original, _ = _undone(earlier, before)
    notes = tuple(entry_warnings({**models, model_id: after}, model_id))
    entry = models.get(model_id)
    return SettingsChange(place, model_id, entry, after, original, earlier, notes, undo_dir)


def plan_disable(
    place: str, models: Models, model_id: str, *, off_only: bool = False, undo_dir: Folder = None
) -> SettingsChange:
    """Plan to switch DFlash off and to give back what exports changed, as `disable_settings`."""
    before = models.get(model_id)
    if before is None:
        note = f"{place} has no settings of {model_id!r}"
        return SettingsChange(place, model_id, None, None, warnings=(note,))
    record = _find_record(place, model_id, before, undo_dir)
    original, notes = _undone(record, before)
    after = dict(original)
    if off_only:
        after = before | {key: value for key, value in original.items() if key in SWITCHES}
    if (off_only or record is None) and after.get("dflash_enabled"):
        after["dflash_enabled"] = False
        notes += [] if record else ["no undo record: only dflash_enabled is switched off"]
    elif after.get("dflash_enabled"):
        notes.append("DFlash was on before the export and is again; --off-only switches it off")
    for key in ("dflash_enabled", *SWITCHES):
        # What was turned on since the export wins: with both, oMLX would drop the entry.
        broken = refusals(after)
        given_back = after.get(key) and not before.get(key)
        if given_back and len(refusals(after | {key: False})) < len(broken):
            after[key] = False
            notes.append(f"{key} stays off: {broken[0]}")
    wanted, left = after if after or not before else None, original if off_only else None
    return SettingsChange(place, model_id, before, wanted, left, record, tuple(notes), undo_dir)


def entry_warnings(models: Models, model_id: str) -> list[str]:
    """List what is not an error in a model's settings but may surprise."""
    entry = models[model_id]
    profile, mode = entry.get("active_profile_name"), entry.get("dflash_verify_mode")
    lines = [f"active_profile_name: {profile!r} may overwrite these settings"] if profile else []
    lines += [f"dflash_verify_mode: {mode} is not for DFlash 2"] * (mode in ("ddtree", "off"))
    for name, other in models.items():
        if name != model_id:
            lines += [f"{name} is lost at oMLX's next save: {line}" for line in refusals(other)]
            on = other.get("dflash_enabled") is True
            lines += [f"{name} has DFlash on too: oMLX's DFlash engine runs one at a time"] * on
    return lines


def _same(left: Any, right: Any) -> bool:
    # As JSON, 1 and true and 1.0 are different.
    return json.dumps(left) == json.dumps(right)


def _undone(record: Record | None, entry: Entry) -> tuple[Entry, list[str]]:
    """Give back what a record changed in an entry, but not what was changed since."""
    _, before, after = record or ("", {}, {})
    given, notes = dict(entry), []
    for key in _changed(before, after):
        if key in _changed(after, entry):
            notes += [f"{key}: changed since the export, left as it is"] if key in entry else []
        elif key in before:
            given[key] = before[key]
        else:
            del given[key]
    return given, notes


def _changed(before: Entry, after: Entry) -> list[str]:
    keys = before | after
    return [k for k in keys if k not in before or k not in after or not _same(before[k], after[k])]


def _find_record(place: str, model_id: str, entry: Entry, undo_dir: Path | None) -> Record | None:
    """Find the record of the place, else of what is in force in the entry."""
    found: list[tuple[bool, int, int, Record]] = []
    for record in _read_records(_record_path(model_id, undo_dir)):
        where, before, after = record
        changed = set(_changed(before, after))
        current = changed - set(_changed(after, entry))
        decisive = changed & {"dflash_enabled", "dflash_draft_model"} or changed
        if where == place or decisive <= current:
            found.append((where == place, len(current), len(found), record))
    return max(found)[3] if found else None


def _record_path(model_id: str, undo_dir: Folder) -> Path:
    name = hashlib.sha256(model_id.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    return (undo_dir or Path.home() / ".mlx_dflash2" / "omlx") / f"model-{name}.json"


def _read_records(path: Path) -> list[Record]:
    try:
        items = json.loads(path.read_bytes())["records"] if path.exists() else []
        return [(str(i["place"]), dict(i["before"]), dict(i["after"])) for i in items]
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"undo record {path}: cannot be read ({error!r}); move it away") from None


def _write_records(path: Path, records: list[Record]) -> None:
    if not records:
        path.unlink(missing_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    items = [dict(zip(("place", "before", "after"), record, strict=True)) for record in records]
    raw = json.dumps({"records": items}, indent=2).encode("utf-8")
    replace_file(path, raw, path.read_bytes() if path.exists() else None)
