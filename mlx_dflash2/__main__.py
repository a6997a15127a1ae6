"""The `mlx_dflash2` command: a dispatcher."""

import sys

from ._version import __version__
from .cli.start import start

COMMANDS = ("generate", "chat", "server", "benchmark", "train", "convert", "doctor", "omlx")
# Their time does not go into matrix products.
WITHOUT_PRODUCTS = ("convert", "omlx")


def main() -> None:
    usage = f"usage: mlx_dflash2 {{{','.join(COMMANDS)}}} ... (each with --help), or --version"
    name = sys.argv.pop(1) if len(sys.argv) > 1 else None
    if name == "--version":
        print(__version__)
    elif name in ("-h", "--help"):
        print(usage)
    elif name in COMMANDS:
        start(f"mlx_dflash2.{name}", fast_blas=name not in WITHOUT_PRODUCTS)
    else:
        sys.exit(f"error: {name!r} is not a command\n{usage}" if name else usage)


if __name__ == "__main__":
    main()
