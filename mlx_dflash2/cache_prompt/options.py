"""The options of `mlx_dflash2.cache_prompt`, which has those of mlx_lm.cache_prompt."""

import argparse
from collections.abc import Sequence

from ..cli.arguments import (
    add_cache_arguments,
    add_draft_model_arguments,
    add_model_arguments,
    add_unsupported_arguments,
    safetensors_file,
)
from ..cli.parser import Parser

UNSUPPORTED = {"--eos-token": "a prompt does not end at one; see --extra-eos-token of generate"}


def setup_arg_parser() -> argparse.ArgumentParser:
    """Set up and return the argument parser."""
    parser = Parser(
        "mlx_dflash2.cache_prompt",
        "Process a prompt, and save the caches of target and drafter to go on from with "
        "mlx_dflash2.generate --prompt-cache-file.",
    )
    add_model_arguments(parser)
    add_draft_model_arguments(parser)
    add_cache_arguments(parser)
    parser.add_argument(
        "--prompt-cache-file",
        type=safetensors_file,
        required=True,
        help="The .safetensors file to save the prompt cache in",
    )
    parser.add_argument(
        "--prompt",
        "-p",
        required=True,
        help="Message to be processed by the model ('-' reads from stdin)",
    )
    add_unsupported_arguments(parser, UNSUPPORTED)
    # Nothing is drafted.
    parser.set_defaults(draft_vocab=None)
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    return setup_arg_parser().parse_args(argv)
