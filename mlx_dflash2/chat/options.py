"""The options of `mlx_dflash2.chat`."""

import argparse
from collections.abc import Sequence

from ..cli.arguments import (
    add_cache_arguments,
    add_drafting_arguments,
    add_max_tokens_argument,
    add_model_arguments,
    add_sampling_arguments,
    add_stop_argument,
    add_template_arguments,
    add_unsupported_arguments,
)
from ..cli.parser import Parser
from ..decode.defaults import CHAT_MAX_TOKENS

UNSUPPORTED = {"--pipeline": "distributed decoding does not draft; use mlx_lm.chat"}


def setup_arg_parser() -> argparse.ArgumentParser:
    """Set up and return the argument parser."""
    parser = Parser("mlx_dflash2.chat", "Chat with a target that has a drafter.")
    add_model_arguments(parser)
    add_template_arguments(parser)
    add_drafting_arguments(parser)
    add_max_tokens_argument(parser, CHAT_MAX_TOKENS)
    add_sampling_arguments(parser)
    add_cache_arguments(parser)
    add_stop_argument(parser)
    add_unsupported_arguments(parser, UNSUPPORTED)
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    return setup_arg_parser().parse_args(argv)
