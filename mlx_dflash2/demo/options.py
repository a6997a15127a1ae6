"""The options of `mlx_dflash2.demo`."""

import argparse
from collections.abc import Sequence

from ..cli.arguments import add_blas_argument
from ..cli.parser import Parser


def setup_arg_parser() -> argparse.ArgumentParser:
    """Set up and return the argument parser."""
    parser = Parser(
        "mlx_dflash2.demo",
        "Decode two prompts with the embedded pair and plainly: compare tokens, and time both.",
    )
    add_blas_argument(parser)
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    return setup_arg_parser().parse_args(argv)
