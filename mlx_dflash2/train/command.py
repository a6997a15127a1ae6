"""The `mlx_dflash2.train` command."""

import argparse

from .run import Run


def main(args: argparse.Namespace) -> None:
    """Run the stages asked for."""
    Run(args).run()
