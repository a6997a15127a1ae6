"""The options of `mlx_dflash2.download`."""

import argparse
from collections.abc import Sequence

from ..cli.arguments import add_draft_model_argument
from ..cli.parser import Parser


def setup_arg_parser() -> argparse.ArgumentParser:
    """Set up and return the argument parser."""
    parser = Parser(
        "mlx_dflash2.download",
        "Download a target and its drafter into the cache of the Hugging Face hub.",
        usage="%(prog)s TARGET [options]",
    )
    parser.add_argument("model", metavar="TARGET", help="The target's Hugging Face repo")
    parser.add_argument("--revision", default=None, help="Revision of the target's repo")
    add_draft_model_argument(parser)
    parser.add_argument(
        "--dry-run", action="store_true", help="Only tell the sizes; download nothing large"
    )
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    return setup_arg_parser().parse_args(argv)
