"""The `mlx_dflash2.train` command."""

import sys

from ..cli.console import run
from .options import parse
from .run import Run


def main():
    """Run the stages asked for."""
    run(_main)


def _main():
    Run(parse(sys.argv[1:])).run()
