"""The command `mlx_dflash2.omlx`: export, disable, check, apply."""

import argparse
import getpass
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from .admin import Admin, AdminError
from .arguments import setup_arg_parser
from .check import check_settings
from .fields import check_value, installed_fields, known_fields
from .fit import Pair, check_pair, check_quant
from .locate import Target, base_dir, find_drafter, find_target, server_answers
from .log import read_log, what_to_look_for
from .merge import (
    SETTINGS_NAME,
    Change,
    disable_settings,
    merge_settings,
    read_settings,
    write_change,
)
from .remote import Applied, apply_settings, disable_remote
from .settings import DEFAULT_QUANT, chip_generation, model_settings


def main(argv: list[str] | None = None) -> None:
    """Run the command line.

    Args:
        argv (list, optional): The arguments. Default: those of the process.
    Raises:
        SystemExit: With one line on what is wrong, if DFlash would not run.
    """
    args = setup_arg_parser().parse_args(argv)
    commands = {"export": _export, "disable": _disable, "check": _check, "apply": _apply}
    try:
        commands[args.command](args)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


def _export(args: argparse.Namespace) -> None:
    base = base_dir(args.base_path)
    target, settings = _settings(args, _model_dirs(args, base))
    plan = merge_settings(
        base / SETTINGS_NAME,
        settings,
        unset=args.unset,
        replace_mtp=args.replace_mtp,
        known=_all_known(args),
    )
    print(json.dumps(settings, indent=2, ensure_ascii=False))
    _show(plan, (*target.warnings, *plan.warnings))
    running = server_answers(args.url)
    if not args.write:
        if running:
            _warn(f"a server answers on {args.url}: stop it before --write, or use apply")
        if not plan.empty:
            print("nothing changed; --write makes the change")
        return
    _refuse_running(running, args.url)
    _write(plan)
    drafter = settings["models"][target.model_id]["dflash_draft_model"]
    print(what_to_look_for(target.model_id, drafter, base / "logs" / "server.log"))


def _disable(args: argparse.Namespace) -> None:
    if args.running:
        plan = disable_remote(
            _session(args.url, args.key_file),
            args.model_id or _target_id(args, Path(args.base_path or "~/.omlx").expanduser()),
            off_only=args.off_only,
            dry_run=not args.write,
        )
        _show(plan, plan.warnings)
    else:
        base = base_dir(args.base_path)
        model_id = args.model_id or _target_id(args, base)
        plan = disable_settings(base / SETTINGS_NAME, model_id, off_only=args.off_only)
        _show(plan, plan.warnings)
        if args.write:
            _refuse_running(server_answers(args.url), args.url)
            _write(plan)
    if not args.write and not plan.empty:
        print("nothing changed; --write makes the change")


def _check(args: argparse.Namespace) -> None:
    if args.model is None and args.log is None:
        raise ValueError("check: found neither --model nor --log, allowed: one or both")
    good = True
    model_id = args.model_id
    if args.model is not None:
        base = base_dir(args.base_path)
        target = find_target(args.model, _model_dirs(args, base), args.model_id)
        model_id = target.model_id
        path, _, _, data = read_settings(base / SETTINGS_NAME)
        report = check_settings(
            data["models"],
            target,
            find_drafter(args.draft_model) if args.draft_model else None,
            chip=_chip(args.chip) if args.chip or sys.platform == "darwin" else None,
            known=_known(args),
            all_known=_all_known(args),
        )
        for line in report.facts:
            print(line)
        for line in report.warnings:
            _warn(line)
        for line in report.problems:
            print(f"problem: {line}")
        good = not report.problems
        print(f"{path}: {model_id} {'would' if good else 'would NOT'} run with DFlash")
        if good and args.log is None:
            print("only the server's log proves that it does: check --log FILE")
    if args.log is not None:
        with open(args.log, encoding="utf-8", errors="replace") as stream:
            verdict = read_log(stream, model_id)
        print(verdict.text)
        good = good and verdict.ran
    if not good:
        sys.exit(1)


def _apply(args: argparse.Namespace) -> None:
    # Which folder and id the server means is checked with the server, not by its directories.
    base = Path(args.base_path or "~/.omlx").expanduser()
    target, settings = _settings(args, _model_dirs(args, base))
    admin = _session(args.url, args.key_file)
    applied = apply_settings(
        admin,
        settings,
        target.folder,
        unset=args.unset,
        replace_mtp=args.replace_mtp,
        reload=not args.no_reload,
        dry_run=args.dry_run,
    )
    _show(applied, applied.warnings)
    if args.dry_run:
        print("nothing sent; leave out --dry-run to make the change")
        return
    print(f"{args.url} has these settings and has kept them")
    drafter = settings["models"][target.model_id]["dflash_draft_model"]
    print(what_to_look_for(target.model_id, drafter))


def _settings(args: argparse.Namespace, model_dirs: list[Path]) -> tuple[Target, dict[str, Any]]:
    """Check target and drafter, and build their settings from the command line."""
    target = find_target(args.model, model_dirs, args.model_id)
    drafter = find_drafter(args.draft_model)
    pair = check_pair(target.folder, drafter)
    settings = model_settings(
        target.model_id,
        str(drafter),
        chip=_chip(args.chip),
        quant=_quant(args.draft_bits, pair),
        block_size=args.block_size,
        group_size=args.draft_group_size,
        activation_bits=args.draft_activation_bits,
        verify_mode=args.verify_mode,
        max_ctx=args.max_ctx,
        quantized_target=pair.target_quantized,
        drafter_block_size=pair.block_size,
        options=_options(args.set),
        known=_known(args),
    )
    check_quant(settings["models"][target.model_id], pair)
    return target, settings


def _quant(given: str | None, pair: Pair) -> int | None:
    if pair.drafter_quantized:
        if given not in (None, "none"):
            raise ValueError(f"--draft-bits: found {given}, allowed: none, it is quantised already")
        return None
    if given == "none":
        return None
    return int(given or DEFAULT_QUANT)


def _options(pairs: list[str]) -> dict[str, Any]:
    options = {}
    for text in pairs:
        key, sign, value = text.partition("=")
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
        if not sign:
            raise ValueError(
                f"--set: found {text!r}, allowed: KEY=JSON, such as dflash_max_ctx=8192"
            )
        check_value(key, options[key])
    return options


def _known(args: argparse.Namespace) -> frozenset[str]:
    """The keys of the field table that the server knows."""
    if args.omlx_version is not None:
        return known_fields(args.omlx_version)
    return installed_fields() or known_fields()


def _all_known(args: argparse.Namespace) -> frozenset[str] | None:
    return installed_fields() if args.omlx_version is None else None


def _chip(given: str | None) -> str:
    if given is None and sys.platform != "darwin":
        raise ValueError("chip: not known on this machine; give --chip, that of oMLX's Mac")
    if given is None:
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        given = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    chip_generation(given)
    return given


def _model_dirs(args: argparse.Namespace, base: Path) -> list[Path]:
    given = args.model_dir or [os.environ.get("OMLX_MODEL_DIR") or str(base / "models")]
    return [Path(path).expanduser() for path in given]


def _target_id(args: argparse.Namespace, base: Path) -> str:
    """The id to disable: a model may be gone from the disk while its settings are still there."""
    if Path(args.model).expanduser().is_dir():
        return find_target(args.model, _model_dirs(args, base)).model_id
    return args.model


def _session(url: str, key_file: str | None) -> Admin:
    parts = urlsplit(url)
    if parts.scheme == "http" and parts.hostname not in ("127.0.0.1", "localhost", "::1"):
        _warn(f"{url}: the API key crosses the network in clear; https or a tunnel would hide it")
    admin = Admin(url)
    try:
        admin.models()
    except AdminError as error:
        if error.status != 401:
            raise
        admin.login(_read_key(key_file))
    return admin


def _read_key(key_file: str | None) -> str:
    if key_file is None:
        return getpass.getpass("oMLX API key: ")
    path = Path(key_file).expanduser()
    if path.stat().st_mode & 0o077:
        _warn(f"{path}: other users of this machine can read the key")
    return path.read_text(encoding="utf-8").strip()


def _refuse_running(running: bool, url: str) -> None:
    if running:
        raise ValueError(
            f"a server answers on {url}: oMLX would overwrite the file; stop it, or use apply "
            "(--url names another port, if this is not oMLX)"
        )
    _warn(f"nothing answers on {url}; if oMLX runs on another port, stop it now")


def _show(change: Change | Applied, warnings: tuple[str, ...]) -> None:
    for line in warnings:
        _warn(line)
    print(change.diff if not change.empty else "no change: the settings are as wanted already")


def _write(plan: Change) -> None:
    if not plan.empty:
        done = write_change(plan)
        print(f"written: {done.path}")
        if done.backup is not None:
            print(f"backup:  {done.backup}")


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)
