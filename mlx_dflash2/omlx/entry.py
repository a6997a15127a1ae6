"""What is wrong, or worth knowing, about the settings of one model."""

import json
from collections.abc import Collection, Mapping
from typing import Any

from .fields import FIELDS, OTHER_KEYS, check_value, find_field

# oMLX refuses, and forgets, an entry with one of these beside `dflash_enabled`.
CONFLICTS = ("mtp_enabled", "vlm_mtp_enabled")
_FIELD_NAMES = frozenset(f.name for f in FIELDS)


def entry_problems(entry: Mapping[str, Any]) -> list[str]:
    """List what would keep oMLX from running DFlash with these settings, in silence.

    Args:
        entry (dict): The settings of one model.
    Returns:
        list: One line for each problem.
    """
    problems = []
    for key in entry:
        if key in _FIELD_NAMES:
            try:
                check_value(key, entry[key])
            except ValueError as error:
                problems.append(str(error))
    if entry.get("dflash_enabled"):
        for key in CONFLICTS:
            if entry.get(key):
                problems.append(
                    f"{key}: found {json.dumps(entry[key])}, allowed: false beside dflash_enabled "
                    "(oMLX drops the whole entry)"
                )
        if entry.get("dflash_block_size") == 1:
            problems.append("dflash_block_size: found 1, allowed: 2 or more (1 drafts nothing)")
    return problems


def keys_to_remove(
    unset: Collection[str], ours: Collection[str], entry: Collection[str]
) -> list[str]:
    """Choose the keys of an entry that are removed on request.

    Args:
        unset (collection): The keys asked for.
        ours (collection): The keys that are set at the same time.
        entry (collection): The keys that are there.
    Returns:
        list: Those to remove.
    Raises:
        ValueError: If a key is unknown, or is being set.
    """
    for key in unset:
        if find_field(key).name in ours:
            raise ValueError(f"--unset: found {key!r}, allowed: a key that is not being set")
    return [key for key in unset if key in entry]


def entry_warnings(
    models: Mapping[str, Mapping[str, Any]], model_id: str, known: Collection[str] | None = None
) -> list[str]:
    """List what is no error but may surprise.

    Args:
        models (dict): The settings of all models.
        model_id (str): The target.
        known (collection, optional): All keys that the server knows, if that is certain.
    Returns:
        list: One line for each warning.
    """
    entry = models.get(model_id, {})
    warnings = []
    if entry.get("active_profile_name"):
        warnings.append(
            f"active_profile_name is {entry['active_profile_name']!r}: applying that profile "
            "again may overwrite the DFlash settings"
        )
    for key in ("turboquant_kv_enabled", "specprefill_enabled"):
        if entry.get(key):
            warnings.append(f"{key} is on: it has no part in DFlash, only after a fallback")
    if entry.get("dflash_draft_window_size") is not None:
        warnings.append("dflash_draft_window_size is set: DFlash 2 does best without it")
    if entry.get("dflash_draft_sink_size"):
        warnings.append("dflash_draft_sink_size is not 0: DFlash 2 was trained without sinks")
    if entry.get("dflash_ssd_cache") and entry.get("dflash_in_memory_cache") is False:
        warnings.append("dflash_ssd_cache does nothing without dflash_in_memory_cache")
    if entry.get("dflash_verify_mode") in ("ddtree", "off"):
        warnings.append(f"dflash_verify_mode is {entry['dflash_verify_mode']!r}: use 'dflash'")
    return warnings + _neighbours(models, model_id) + _foreign(models, known)


def _neighbours(models: Mapping[str, Mapping[str, Any]], model_id: str) -> list[str]:
    lines = []
    for other, entry in models.items():
        if other == model_id or entry.get("dflash_enabled") is not True:
            continue
        if any(entry.get(key) for key in CONFLICTS):
            lines.append(f"{other}: both MTP and DFlash are on; oMLX will drop that entry")
        elif entry.get("is_pinned"):
            lines.append(f"{other} is pinned with DFlash on: oMLX runs one DFlash model at a time")
        else:
            lines.append(f"{other} has DFlash on too: loading one of the two unloads the other")
    return lines


def _foreign(models: Mapping[str, Mapping[str, Any]], known: Collection[str] | None) -> list[str]:
    names = known or (_FIELD_NAMES | OTHER_KEYS)
    foreign = sorted({key for entry in models.values() for key in entry if key not in names})
    if not foreign:
        return []
    return [
        f"unknown keys {', '.join(map(repr, foreign))}: kept here, but oMLX deletes the keys "
        "it does not know at its next save"
    ]
