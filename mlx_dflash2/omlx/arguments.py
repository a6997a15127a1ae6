"""The command line of `mlx_dflash2.omlx`."""

import argparse

from .fields import NEWEST_OMLX
from .locate import DEFAULT_URL
from .settings import DEFAULT_GROUP_SIZE, DEFAULT_QUANT, DEFAULT_VERIFY_MODE


def setup_arg_parser() -> argparse.ArgumentParser:
    """Set up the command line.

    Returns:
        argparse.ArgumentParser: The parser, with one subparser a command.
    """
    parser = argparse.ArgumentParser(
        prog="mlx_dflash2.omlx", description="Make oMLX run a model with a DFlash 2 drafter"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, words in (
        ("export", "show the settings and the change to oMLX's file; --write makes it"),
        ("disable", "switch DFlash off and give back what was changed; --write makes it"),
        ("check", "say whether oMLX would run DFlash, or whether it did, and why not"),
        ("apply", "apply the settings to a running oMLX over its admin interface"),
    ):
        command = commands.add_parser(name, help=words, description=words)
        _add_target(command, required=name != "check")
        if name in ("export", "apply"):
            _add_settings(command)
        if name != "disable":
            command.add_argument("--chip", help="the server's chip, such as M4 Max; default: ours")
            command.add_argument(
                "--omlx-version",
                help="the server's version; default: what an importable omlx package knows, "
                f"else {NEWEST_OMLX}",
            )
        if name in ("export", "disable"):
            command.add_argument("--write", action="store_true", help="make the change")
        if name == "disable":
            command.add_argument(
                "--off-only", action="store_true", help="keep the other DFlash keys"
            )
        if name == "check":
            command.add_argument("--draft-model", help="the drafter that is meant")
            command.add_argument("--log", help="a server.log to read")
        if name == "apply":
            command.add_argument("--dry-run", action="store_true", help="only show the change")
            command.add_argument("--no-reload", action="store_true", help="leave models loaded")
        _add_server(command, name)
    return parser


def _add_target(command: argparse.ArgumentParser, required: bool) -> None:
    command.add_argument(
        "--model", required=required, help="the target: its folder, or its name in oMLX"
    )
    command.add_argument("--model-id", help="the target's id, where oMLX shows another one")
    command.add_argument(
        "--model-dir", action="append", help="a model directory of oMLX; default: its models folder"
    )
    command.add_argument("--base-path", help="oMLX's base directory, if it is started with one")


def _add_settings(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--draft-model", required=True, help="the drafter: its folder, or a repo id on this disk"
    )
    command.add_argument(
        "--draft-bits",
        choices=["2", "4", "8", "none"],
        help=f"quantise the drafter at load; none loads it as stored (default: {DEFAULT_QUANT})",
    )
    command.add_argument("--draft-group-size", type=int, default=DEFAULT_GROUP_SIZE)
    command.add_argument(
        "--draft-activation-bits", type=int, help="default: 32 on M1 and M2, else 16"
    )
    command.add_argument(
        "--block-size",
        type=int,
        help="default: 5 for a quantised target, else the drafter's own",
    )
    command.add_argument("--verify-mode", default=DEFAULT_VERIFY_MODE)
    command.add_argument("--max-ctx", type=int, help="longest prompt for DFlash; default: no limit")
    command.add_argument(
        "--set", action="append", default=[], metavar="KEY=JSON", help="any other DFlash key"
    )
    command.add_argument(
        "--unset", action="append", default=[], metavar="KEY", help="remove a DFlash key"
    )
    command.add_argument(
        "--replace-mtp", action="store_true", help="turn MTP off where it is on; disable undoes it"
    )


def _add_server(command: argparse.ArgumentParser, name: str) -> None:
    if name != "check":
        command.add_argument(
            "--url", default=DEFAULT_URL, help="where oMLX listens (default: %(default)s)"
        )
    if name == "disable":
        command.add_argument(
            "--running", action="store_true", help="change the server at --url, not the file"
        )
    if name in ("disable", "apply"):
        command.add_argument("--key-file", help="a file with oMLX's API key; default: ask for it")
