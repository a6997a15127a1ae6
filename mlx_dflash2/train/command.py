"""The `mlx_dflash2.train` command."""

import sys

from ..cli.console import run
from .options import parse
from .run import Run


def main() -> None:
    """Run the stages asked for."""
    run(lambda: Run(parse(sys.argv[1:])).run())
