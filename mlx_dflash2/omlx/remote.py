"""Change the settings of a running server, and prove that it kept the change."""

import difflib
import json
import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .admin import Admin, AdminError
from .entry import entry_problems, entry_warnings, keys_to_remove
from .fields import DFLASH2_OMLX
from .merge import check_mtp, plan_disable
from .settings import single_entry
from .undo import extend_record, load_record, same, save_record


@dataclass(frozen=True)
class Applied:
    """A change to a running server, planned or made."""

    model_id: str
    before: dict[str, Any]
    after: dict[str, Any]
    warnings: tuple[str, ...] = ()

    @property
    def empty(self) -> bool:
        """Whether the server already has these settings."""
        return same(self.before, self.after)

    @property
    def diff(self) -> str:
        """The change of the model's settings as a unified diff; empty if there is none."""
        old, new = (
            json.dumps(side, indent=2, ensure_ascii=False).splitlines()
            for side in (self.before, self.after)
        )
        name = f"settings of {self.model_id}"
        return "\n".join(difflib.unified_diff(old, new, name, name, lineterm=""))


def find_model(
    models: Mapping[str, Mapping[str, Any]], model_id: str, folder: Path
) -> Mapping[str, Any]:
    """Find a model on the server by its folder, and check that DFlash is open to it.

    Args:
        models (dict): The server's models.
        model_id (str): The id expected.
        folder (Path): The target's folder.
    Returns:
        dict: What the server says about the model.
    Raises:
        ValueError: If the server knows the folder by another id or not at all, or refuses DFlash.
    """
    for name, model in models.items():
        if name != model_id and _is_folder(model, folder):
            raise ValueError(
                f"target: found {model_id!r}, allowed: {name!r}, as the server calls {folder}; "
                f"give --model-id {name}"
            )
    model = models.get(model_id)
    if model is None:
        raise ValueError(_unknown(models, model_id))
    if _is_folder(model, folder) is False:
        path = model["model_path"]
        raise ValueError(f"target: found {folder}, allowed: {path}, the server's {model_id!r}")
    if model.get("dflash_compatible") is False:
        reason = model.get("dflash_compatibility_reason") or "no reason given"
        raise ValueError(f"{model_id}: the server refuses DFlash for it: {reason}")
    return model


def _is_folder(model: Mapping[str, Any], folder: Path) -> bool | None:
    """Whether the server's model is this folder; None where its path is not on this machine."""
    path = Path(model.get("model_path") or "/nowhere")
    return path.samefile(folder) if path.is_dir() else None


def _unknown(models: Mapping[str, Any], model_id: str) -> str:
    names = ", ".join(sorted(models)) or "none"
    return f"target: found {model_id!r}, allowed: a model of the server: {names}"


def apply_settings(
    admin: Admin,
    settings: Mapping[str, Any],
    folder: Path,
    *,
    unset: Collection[str] = (),
    replace_mtp: bool = False,
    reload: bool = True,
    dry_run: bool = False,
    undo_dir: Path | None = None,
) -> Applied:
    """Apply the settings of one model to a running server, and check that it keeps them.

    Args:
        admin (Admin): A session, logged in where the server asks for it.
        settings (dict): A document as from `model_settings`.
        folder (Path): The target's folder.
        unset (collection): Keys to reset to the server's default.
        replace_mtp (bool): Turn MTP off where it is on. Default: ``False``.
        reload (bool): Make the server read its file again. Default: ``True``.
        dry_run (bool): Only say what would change. Default: ``False``.
        undo_dir (Path, optional): Where undo records are kept.
    Returns:
        Applied: What changed.
    Raises:
        ValueError: If the server would not run DFlash; its settings are as before then, unless
            the line says that they could not be taken back.
    """
    model_id, ours = single_entry(settings)
    models = admin.models()
    before = _stored(find_model(models, model_id, folder))
    check_mtp(before, ours, replace_mtp)
    reset = keys_to_remove(unset, ours, before)
    after = {k: v for k, v in before.items() if k not in reset} | ours
    if problems := entry_problems(after):
        raise ValueError(f"{model_id}: {problems[0]}")
    entries = {name: _stored(model) for name, model in models.items()} | {model_id: after}
    applied = Applied(model_id, before, after, tuple(entry_warnings(entries, model_id)))
    if dry_run or applied.empty:
        return applied
    record = load_record(admin.url, model_id, undo_dir)
    save_record(admin.url, model_id, extend_record(record, before, after), undo_dir)
    payload = dict.fromkeys(reset) | ours
    stored = None
    try:
        stored = admin.put_settings(model_id, payload)
        _check_kept(stored, ours)
        if reload:
            admin.reload()
            _check_reloaded(admin.models().get(model_id) or {}, ours)
    except ValueError as error:
        if stored is None and isinstance(error, AdminError):
            # The server refused the change: there is nothing to take back.
            raise
        _take_back(admin, model_id, {key: before.get(key) for key in payload}, error)
        save_record(admin.url, model_id, record, undo_dir)
        raise ValueError(f"{error}; the settings are as before") from None
    return applied


def _take_back(admin: Admin, model_id: str, values: Mapping[str, Any], error: ValueError) -> None:
    """Put the values from before a change that failed with ``error``."""
    try:
        admin.put_settings(model_id, values)
    except ValueError as again:
        name, url = shlex.quote(model_id), shlex.quote(admin.url)
        raise ValueError(
            f"{error}; the new settings are on the server and could not be taken back ({again}); "
            f"`mlx_dflash2.omlx disable --running --write --model {name} --url {url}` undoes them"
        ) from None


def disable_remote(
    admin: Admin,
    model_id: str,
    *,
    off_only: bool = False,
    dry_run: bool = False,
    undo_dir: Path | None = None,
) -> Applied:
    """Switch DFlash off on a running server and give back what `apply_settings` changed.

    Args:
        admin (Admin): A session, logged in where the server asks for it.
        model_id (str): The model.
        off_only (bool): Keep the other DFlash keys. Default: ``False``.
        dry_run (bool): Only say what would change. Default: ``False``.
        undo_dir (Path, optional): Where undo records are kept.
    Returns:
        Applied: What changed.
    Raises:
        ValueError: If the server does not know the model, or refuses.
    """
    models = admin.models()
    if model_id not in models:
        raise ValueError(_unknown(models, model_id))
    before = _stored(models[model_id])
    record = load_record(admin.url, model_id, undo_dir)
    values, remove, notes = plan_disable(record, before, off_only)
    wanted = {k: v for k, v in before.items() if k not in remove} | values
    if dry_run or same(wanted, before):
        return Applied(model_id, before, wanted, tuple(notes))
    after = _stored({"settings": admin.put_settings(model_id, dict.fromkeys(remove) | values)})
    if after.get("dflash_enabled") and not values.get("dflash_enabled"):
        raise ValueError(f"dflash_enabled: {admin.url} still has it on after switching it off")
    if not off_only:
        save_record(admin.url, model_id, {}, undo_dir)
    return Applied(model_id, before, after, tuple(notes))


def _stored(model: Mapping[str, Any]) -> dict[str, Any]:
    """A model's settings; the server may show a key that is not set as null."""
    return {k: v for k, v in (model.get("settings") or {}).items() if v is not None}


def _check_kept(stored: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    for key, value in ours.items():
        # A switch that is off may be shown by leaving it out.
        if same(stored.get(key), value) or (value is False and stored.get(key) is None):
            continue
        if key == "dflash_block_size" and stored.get(key) is None:
            raise ValueError(
                "dflash_block_size: the server did not keep it, so it is too old for DFlash 2; "
                f"allowed: oMLX {DFLASH2_OMLX[0]}, or {DFLASH2_OMLX[1]} and later"
            )
        raise ValueError(
            f"{key}: the server stored {json.dumps(stored.get(key))}, not {json.dumps(value)}"
        )


def _check_reloaded(model: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    # The list of models does not show every key; the two that decide are always in it.
    stored = _stored(model)
    shown = {"dflash_enabled", "dflash_draft_model", *stored}
    _check_kept(stored, {key: value for key, value in ours.items() if key in shown})
