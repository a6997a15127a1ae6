"""The command `mlx_dflash2.omlx`: export, apply, disable, check, status."""

import argparse
import getpass
import json
import os
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..cli import console
from . import server
from .change import Models, SettingsChange, plan_disable, plan_export
from .check import check_entry, check_pair, check_settings, status_row
from .file import SETTINGS_NAME, read_settings, write_change
from .locate import ListedModel, OmlxVersion, base_dir, discover, find_drafter, find_target
from .log import LoggedModel, find_log, log_lines, read_log
from .settings import model_settings

_OPTIONS = ("block_size", "group_size", "activation_bits", "verify_mode", "max_ctx")


def main(args: argparse.Namespace) -> None:
    """Run the command; the exit status is not 0 if DFlash would not run, or did not."""
    {"check": _check, "status": _status}.get(args.command, _change)(args)


def _change(args: argparse.Namespace) -> None:
    """Export, apply or disable: plan a change, show it, and make it if that is wanted."""
    admin = listed = None
    if args.command == "apply" or getattr(args, "running", False):
        # Which folder and id a server means is checked with the server, not by its directories.
        base = Path(args.base_path or "~/.omlx").expanduser()
        admin = _session(args)
        place, listed = admin.url, admin.models()
        models = {name: server.stored_settings(model) for name, model in listed.items()}
    else:
        base = base_dir(args.base_path)
        file = read_settings(base / SETTINGS_NAME)
        place, models = str(file.path), file.models
    change = _plan(args, base, place, models, listed)
    wanted, running = _wanted(args, change), admin is None and server.server_answers(args.url)
    if running and not change.empty:
        advice = f"a server answers on {args.url} and would overwrite the file: stop it, or use "
        advice += "apply or disable --running (--url names another port, if it is not oMLX)"
        if wanted:
            raise ValueError(advice)
        _warn(advice)
    if wanted and admin is not None:
        minutes = server.CHANGE_SECONDS / 60
        console.note(f"{admin.url} may load models again: waiting up to {minutes:.0f} minutes")
        server.send_change(admin, change, reload=not getattr(args, "no_reload", True))
        console.note(f"{admin.url} has these settings and has kept them")
    elif wanted:
        _warn(f"nothing answers on {args.url}; if oMLX runs on another port, stop it now")
        backup = write_change(file, change)
        console.note(f"written: {file.path}" + (f"; backup: {backup.name}" if backup else ""))


def _plan(
    args: argparse.Namespace, base: Path, place: str, models: Models, listed: Models | None
) -> SettingsChange:
    if args.command == "disable":
        # A model may be gone from the disk while its settings are still there.
        here = not args.model_id and Path(args.model).expanduser().is_dir()
        model_id = args.model_id or args.model
        model_id = find_target(args.model, _model_dirs(args, base)).model_id if here else model_id
        model_id = model_id if listed is None else server.server_id(listed, model_id, None)
        return plan_disable(place, models, model_id, off_only=args.off_only)
    omlx = OmlxVersion.find(args.omlx_version, args.url)
    omlx.check()
    target = find_target(args.model, _model_dirs(args, base), args.model_id)
    drafter = find_drafter(args.draft_model, _model_dirs(args, base))
    pair = check_pair(target.folder or base, drafter)
    bits = args.draft_bits or ("none" if pair.drafter_quantized else "4")
    settings = model_settings(
        server.server_id(listed, target.model_id, target.folder) if listed else target.model_id,
        str(drafter),
        # Where it drafts inside its batched engine, the chip decides nothing.
        chip=_chip(args) or ("M3" if omlx.drafts_batched(pair.model_type) else None),
        quant=None if bits == "none" else int(bits),
        quantized_target=pair.target_quantized,
        drafter_block_size=pair.block_size,
        options=dict(map(_option, args.set)),
        **{name: value for name in _OPTIONS if (value := getattr(args, name)) is not None},
    )
    ((_, entry),) = settings["models"].items()
    check_entry(entry, pair)
    off = [*args.turn_off, *(("mtp_enabled", "vlm_mtp_enabled") if args.replace_mtp else ())]
    change = plan_export(place, models, settings, unset=args.unset, turn_off=off)
    if args.json or (args.command == "export" and not args.diff):
        print(json.dumps(settings, indent=2, ensure_ascii=False))
    # What a server returned itself is known to it.
    notes = omlx.notes(entry if listed else change.after or {}, pair.model_type)
    notes += [target.note] if target.note else []
    return replace(change, warnings=(*notes, *change.warnings))


def _wanted(args: argparse.Namespace, change: SettingsChange) -> bool:
    """Show a change, and find out whether it is to be made."""
    _warn(*change.warnings)
    if change.empty:
        console.note("no change: the settings are as wanted already")
        return False
    if args.diff or not getattr(args, "json", False):
        print(change.diff, flush=True)
    dry = getattr(args, "dry_run", False)
    if args.command == "apply" and not (args.write or dry) and sys.stdin.isatty():
        print("make this change? [y/N] ", end="", file=sys.stderr, flush=True)
        args.write = sys.stdin.readline().strip().lower() in ("y", "yes")
    if not args.write or dry:
        console.note("nothing changed; --write makes the change")
    return args.write and not dry


def _check(args: argparse.Namespace) -> None:
    good, names = True, [args.model_id] if args.model_id else []
    models: Models = {}
    if args.model or args.log is None:
        base = base_dir(args.base_path)
        path, _, _, models = read_settings(base / SETTINGS_NAME)
        on = [name for name, entry in models.items() if entry.get("dflash_enabled")]
        if not (on or args.model):
            raise ValueError(f"{path}: no model has DFlash on")
        omlx, chip = OmlxVersion.find(args.omlx_version, args.url), _chip(args)
        dirs, wanted = _model_dirs(args, base), [args.model] if args.model else on
        drafter = find_drafter(args.draft_model, dirs) if args.draft_model else None
        targets = [find_target(name, dirs, args.model_id) for name in wanted]
        names = [target.model_id for target in targets]
        for target in targets:
            problems, notes = check_settings(models, target, omlx, drafter=drafter, chip=chip)
            _warn(*notes)
            print("".join(f"problem: {line}\n" for line in problems), end="")
            would = "would NOT" if problems else "would"
            print(f"{path}: {target.model_id} {would} run with DFlash in {omlx}")
            good = good and not problems
    if args.log is not None:
        logged = _logged(args, models)
        last = [name for name, model in logged.items() if model.draft or model.acceptance]
        for name in names or last[-1:] or [*logged][-1:] or ["the log"]:
            model = logged.get(name, LoggedModel())
            print(f"{name}: {model.verdict}", *model.rows()[-10:], sep="\n")
            good = good and model.ran
    if not good:
        sys.exit(1)


def _status(args: argparse.Namespace) -> None:
    base = base_dir(args.base_path)
    file, listed = read_settings(base / SETTINGS_NAME), discover(_model_dirs(args, base))
    models = file.models
    omlx, chip = OmlxVersion.find(args.omlx_version, args.url), _chip(args)
    logged = _logged(args, models) if args.log or find_log(base).is_file() else {}
    rows = [("model", "DFlash", "drafter", "quantized", "acceptance", "to do")]
    for name in sorted({*models, *listed}):
        target, log = ListedModel(name, listed.get(name)), logged.get(name, LoggedModel())
        rows.append(status_row(models, target, log, omlx, chip))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(map(str.ljust, row, widths)).rstrip())
    console.note(f"{file.path} as read by {omlx}")


def _logged(args: argparse.Namespace, models: Models) -> dict[str, LoggedModel]:
    path = Path(args.log).expanduser() if args.log else find_log(base_dir(args.base_path))
    aliases = {str(entry.get("model_alias")): name for name, entry in models.items()}
    return read_log(log_lines(path), aliases)


def _session(args: argparse.Namespace) -> server.Admin:
    admin = server.Admin(args.url)
    if not admin.secure and admin.host not in ("127.0.0.1", "localhost", "::1"):
        _warn(f"{args.url}: the API key crosses the network in clear; https or a tunnel hides it")
    try:
        admin.models()
    except server.AdminError as error:
        if error.status != 401:
            raise
        admin.login(_read_key(args.key_file))
    return admin


def _read_key(key_file: str | None) -> str:
    if key_file is not None:
        path = Path(key_file).expanduser()
        if path.stat().st_mode & 0o077:
            _warn(f"{path}: other users of this machine can read the key")
        return path.read_text(encoding="utf-8").strip()
    with warnings.catch_warnings():
        # Without a terminal the key would be shown.
        warnings.simplefilter("error", getpass.GetPassWarning)
        try:
            return getpass.getpass("oMLX API key: ")
        except (EOFError, getpass.GetPassWarning):
            raise ValueError("no API key was given; --key-file names a file with it") from None


def _model_dirs(args: argparse.Namespace, base: Path) -> list[Path]:
    given = args.model_dir or [os.environ.get("OMLX_MODEL_DIR") or base / "models"]
    return [Path(path).expanduser() for path in given]


def _chip(args: argparse.Namespace) -> str | None:
    if args.chip is None and sys.platform == "darwin":
        from ..evaluation.machine import chip_name

        return chip_name()
    return args.chip


def _option(text: str) -> tuple[str, Any]:
    key, _, value = text.partition("=")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def _warn(*lines: str) -> None:
    for line in lines:
        console.note(f"warning: {line}")
