"""The `mlx_dflash2` command: a dispatcher."""

import sys

from ._version import __version__
from .cli.versions import tell_versions

COMMANDS = {
    "generate": "answer a prompt",
    "chat": "hold a conversation in a terminal",
    "server": "serve a pair behind OpenAI's API",
    "demo": "try the embedded pair: tokens and speed beside plain mlx-lm",
    "benchmark": "compare ways of decoding: speed, acceptance, tokens",
    "cache_prompt": "process a long prompt once, for many answers",
    "doctor": "describe this machine; tell whether a pair fits and what it brings",
    "convert": "write a drafter in MLX format, quantized or not",
    "train": "train a drafter for a target",
    "download": "fetch a target and its drafter, after their sizes",
    "omlx": "write, check and undo oMLX's settings for a pair",
}


def usage() -> str:
    """Return how to use the command: a line for each of its commands."""
    lines = [f"  {name:<12} {purpose}" for name, purpose in COMMANDS.items()]
    first = "usage: mlx_dflash2 COMMAND ..., or mlx_dflash2 --version"
    return "\n".join([first, "", *lines, "", "Each command has --help."])


def _start(name: str) -> None:
    try:
        # Imported here so that Ctrl-C is answered in one line from now on.
        from .cli.start import start

        start(f"mlx_dflash2.{name}")
    except KeyboardInterrupt:
        sys.exit(130)


def main() -> None:
    """Run the command that the first argument names."""
    name = sys.argv.pop(1) if len(sys.argv) > 1 else None
    if name == "--version":
        print(__version__)
        tell_versions()
    elif name in ("-h", "--help"):
        print(usage())
    elif name in COMMANDS:
        _start(name)
    else:
        error = f"error: there is no command {name!r}\n" if name else ""
        print(f"{usage()}\n{error}", end="", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
