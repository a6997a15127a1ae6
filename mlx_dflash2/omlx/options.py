"""The options of `mlx_dflash2.omlx`, with one subparser a command."""

import argparse
from collections.abc import Sequence
from typing import Any

from ..cli.parser import Parser

DEFAULT_URL = "http://127.0.0.1:8000"
COMMANDS = {
    "export": "show the settings and the change to oMLX's file; --write makes it",
    "apply": "change a running oMLX over its admin interface, after asking",
    "disable": "switch DFlash off and give back what was changed; --write makes it",
    "check": "say whether oMLX would run DFlash, or whether it did, and why not",
    "status": "show all models: DFlash, drafter, quantization, acceptance and what to do",
}
_FLAG = {"action": "store_true"}
_KEYS = {"action": "append", "default": [], "metavar": "KEY"}
# Each flag, the first letters of the commands that take it, and what it means.
_FLAGS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("--base-path", "eadcs", "oMLX's base directory, if it is started with one", {}),
    ("--model-dir", "eadcs", "a model directory of oMLX; default: models", {"action": "append"}),
    ("--url", "eadcs", "where oMLX listens", {"default": DEFAULT_URL}),
    ("--model", "ead", "the target: its folder, or its name in oMLX", {"required": True}),
    ("--model", "c", "a target; default: all that have DFlash on", {}),
    ("--model-id", "eadc", "the target's id, where oMLX shows another one", {}),
    ("--draft-model", "ea", "the drafter: its folder or repo id", {"required": True}),
    ("--draft-model", "c", "the drafter that is meant", {}),
    ("--chip", "eacs", "the chip of oMLX's Mac, such as M4 Max; default: this one's", {}),
    ("--omlx-version", "eacs", "default: asked from the server, or found on this machine", {}),
    ("--log", "cs", "read the log: oMLX's own, or this file", {"nargs": "?", "const": ""}),
    ("--draft-bits", "ea", "quantization at load; default: 4", {"choices": "2 4 8 none".split()}),
    ("--draft-group-size", "ea", "default: 64", {"type": int, "dest": "group_size"}),
    ("--draft-activation-bits", "ea", "default: by chip", {"type": int, "dest": "activation_bits"}),
    ("--block-size", "ea", "default: 5; the drafter's own if unquantized", {"type": int}),
    ("--verify-mode", "ea", "how oMLX verifies; default: dflash", {}),
    ("--max-ctx", "ea", "longest prompt for DFlash; default: no limit", {"type": int}),
    ("--set", "ea", "any other DFlash key, as KEY=JSON", _KEYS | {"metavar": "KEY=JSON"}),
    ("--unset", "ea", "remove a key", _KEYS),
    ("--turn-off", "ea", "turn a switch off that oMLX refuses beside DFlash", _KEYS),
    ("--replace-mtp", "ea", "turn MTP off; disable gives it back", _FLAG),
    ("--json", "ea", "print only the settings", _FLAG),
    ("--diff", "ead", "print only the change", _FLAG),
    ("--write --yes", "ead", "make the change, do not ask", _FLAG),
    ("--dry-run", "a", "only show the change", _FLAG),
    ("--no-reload", "a", "leave models loaded", _FLAG),
    ("--off-only", "d", "keep the other DFlash keys", _FLAG),
    ("--running", "d", "change the server, not the file", _FLAG),
    ("--key-file", "ad", "a file with oMLX's API key; default: ask for it", {}),
)


def setup_arg_parser() -> argparse.ArgumentParser:
    """Set up the command line, with one subparser a command."""
    parser = Parser(
        "mlx_dflash2.omlx",
        "Make oMLX run a model with a DFlash 2 drafter",
        usage="%(prog)s COMMAND [options]",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, words in COMMANDS.items():
        command = commands.add_parser(name, help=words, description=words)
        for flag, letters, meaning, options in _FLAGS:
            if name[0] in letters:
                command.add_argument(*flag.split(), help=meaning, **options)
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    return setup_arg_parser().parse_args(argv)
