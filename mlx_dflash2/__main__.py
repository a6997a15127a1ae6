"""The `mlx_dflash2` command: a dispatcher."""

import importlib
import sys

from ._version import __version__

COMMANDS = ("generate", "chat", "server", "benchmark", "train", "convert", "doctor", "omlx")


def main():
    usage = f"usage: mlx_dflash2 {{{','.join(COMMANDS)}}} ... (each with --help), or --version"
    name = sys.argv.pop(1) if len(sys.argv) > 1 else None
    if name == "--version":
        print(__version__)
    elif name in ("-h", "--help"):
        print(usage)
    elif name in COMMANDS:
        importlib.import_module(f"mlx_dflash2.{name}.command").main()
    else:
        sys.exit(f"error: {name!r} is not a command\n{usage}" if name else usage)


if __name__ == "__main__":
    main()
