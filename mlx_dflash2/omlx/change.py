"""What an export or its undo makes of one model's settings, in a file or on a server.

What exports changed is kept outside oMLX's files, in one file for each model. A record maps each
changed key to {"before": ..., "after": ...}; a side is missing where the key was.
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
from .store import read_bytes, replace_file

Entry = dict[str, Any]
Record = dict[str, dict[str, Any]]


class NotTakenBack(ValueError):
    """A change failed half way, and is still in force."""


@dataclass(frozen=True)
class SettingsChange:
    """A change of one model's settings; an entry is None where the model has none.

    ``earlier`` is the record of what exports have changed so far, ``record`` that of what can be
    undone afterwards.
    """

    place: str
    model_id: str
    before: Entry | None
    after: Entry | None
    earlier: Record
    record: Record
    warnings: tuple[str, ...] = ()
    undo_dir: Path | None = None

    @property
    def empty(self) -> bool:
        """Whether the settings are already as they should be."""
        return _same(self.before, self.after)

    @property
    def values(self) -> Entry:
        """The keys that change, null where they go."""
        before, after = self.before or {}, self.after or {}
        changed = {k: v for k, v in after.items() if k not in before or not _same(v, before[k])}
        return dict.fromkeys(key for key in before if key not in after) | changed

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
        old, new = _read_records(path), (self.place, self.record)
        _write_records(path, [*old, new])
        try:
            yield
        except NotTakenBack:
            raise
        except (OSError, ValueError):
            _write_records(path, old)
            raise
        others = [item for item in old if item[0] != self.place and item[1] != self.earlier]
        _write_records(path, [*others, new])


def plan_export(
    place: str,
    models: Mapping[str, Entry],
    settings: Mapping[str, Any],
    *,
    unset: Collection[str] = (),
    turn_off: Collection[str] = (),
    undo_dir: Path | None = None,
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
    record = _extend(earlier, before, after)
    notes = tuple(entry_warnings({**models, model_id: after}, model_id))
    entry = models.get(model_id)
    return SettingsChange(place, model_id, entry, after, earlier, record, notes, undo_dir)


def plan_disable(
    place: str,
    models: Mapping[str, Entry],
    model_id: str,
    *,
    off_only: bool = False,
    undo_dir: Path | None = None,
) -> SettingsChange:
    """Plan to switch DFlash off and to give back what exports changed, as `disable_settings`."""
    before = models.get(model_id)
    if before is None:
        note = f"{place} has no settings of {model_id!r}"
        return SettingsChange(place, model_id, None, None, {}, {}, (note,))
    record = _find_record(place, model_id, before, undo_dir)
    after, notes = dict(before), []
    for key, change in record.items():
        if off_only and key not in SWITCHES:
            continue
        if not _in_force(change, before, key):
            notes += [f"{key}: changed since the export, left as it is"] if key in before else []
        elif "before" in change:
            after[key] = change["before"]
        else:
            del after[key]
    if (off_only or not record) and after.get("dflash_enabled"):
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
    left = {k: v for k, v in record.items() if off_only and k not in SWITCHES}
    wanted = after if after or not before else None
    return SettingsChange(place, model_id, before, wanted, record, left, tuple(notes), undo_dir)


def entry_warnings(models: Mapping[str, Entry], model_id: str) -> list[str]:
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


def _in_force(change: Mapping[str, Any], entry: Entry, key: str) -> bool:
    """Whether an entry still has what an export made of a key."""
    return (key in entry) == ("after" in change) and _same(entry.get(key), change.get("after"))


def _extend(record: Record, before: Entry, after: Entry) -> Record:
    """Add a change to a record, keeping the values from before the first export."""
    result = {}
    for key in dict.fromkeys((*record, *before, *after)):
        change = {"before": before[key]} if key in before else {}
        # An earlier value counts only while ours is in force.
        if key in record and _in_force(record[key], before, key):
            change = {side: value for side, value in record[key].items() if side == "before"}
        if key in after:
            change["after"] = after[key]
        if len(change) == 1 or (change and not _same(change["before"], change["after"])):
            result[key] = change
    return result


def _find_record(place: str, model_id: str, entry: Entry, undo_dir: Path | None) -> Record:
    """Find what exports changed in a model's entry: that of the place, else what is in force."""
    found: list[tuple[bool, int, int, Record]] = []
    for where, record in _read_records(_record_path(model_id, undo_dir)):
        current = {key for key in record if _in_force(record[key], entry, key)}
        decisive = record.keys() & {"dflash_enabled", "dflash_draft_model"} or record.keys()
        if where == place or decisive <= current:
            found.append((where == place, len(current), len(found), record))
    return max(found)[3] if found else {}


def _record_path(model_id: str, undo_dir: Path | None) -> Path:
    name = hashlib.sha256(model_id.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    return (undo_dir or Path.home() / ".mlx_dflash2" / "omlx") / f"model-{name}.json"


def _read_records(path: Path) -> list[tuple[str, Record]]:
    try:
        items = json.loads(path.read_bytes())["records"] if path.exists() else []
        changed = [{key: dict(side) for key, side in item["changed"].items()} for item in items]
        return [(str(item["place"]), record) for item, record in zip(items, changed, strict=True)]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"undo record {path}: cannot be read ({error!r}); move it away") from None


def _write_records(path: Path, records: list[tuple[str, Record]]) -> None:
    items = [{"place": place, "changed": record} for place, record in records if record]
    if not items:
        path.unlink(missing_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps({"records": items}, indent=2).encode("utf-8"), read_bytes(path))
