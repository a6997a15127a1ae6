"""The options of `mlx_dflash2.generate`."""

import argparse
from collections.abc import Sequence

from ..cli.arguments import (
    add_cache_arguments,
    add_drafting_arguments,
    add_grammar_arguments,
    add_max_tokens_argument,
    add_model_arguments,
    add_prompt_arguments,
    add_ranks_argument,
    add_sampling_arguments,
    add_stop_argument,
    add_unsupported_arguments,
    boolean,
    safetensors_file,
)
from ..cli.parser import Parser
from ..decode.defaults import GENERATE_MAX_TOKENS

UNSUPPORTED = {
    "--image": "images are not drafted for; use mlx_lm.generate",
    "--num-draft-tokens": "a DFlash drafter drafts a block; see --block-size, --verify-width",
    "--use-default-chat-template": "it has no effect in mlx-lm either; leave it out",
}


def setup_arg_parser() -> argparse.ArgumentParser:
    """Set up and return the argument parser."""
    parser = Parser("mlx_dflash2.generate", "Generate text from a target with a drafter.")
    add_model_arguments(parser)
    add_prompt_arguments(parser)
    add_drafting_arguments(parser)
    add_max_tokens_argument(parser, GENERATE_MAX_TOKENS)
    add_sampling_arguments(parser)
    add_cache_arguments(parser)
    add_stop_argument(parser)
    add_grammar_arguments(parser)
    add_ranks_argument(parser)
    parser.add_argument(
        "--prompt-cache-file",
        default=None,
        help="A file of saved caches to continue from, written by mlx_lm.cache_prompt or by "
        "--save-prompt-cache",
    )
    parser.add_argument(
        "--save-prompt-cache",
        type=safetensors_file,
        default=None,
        metavar="FILE",
        help="Write the caches of prompt and answer to a .safetensors file. As in mlx-lm, a run "
        "with --prompt-cache-file appends its prompt directly; for the turns of a chat use "
        "mlx_dflash2.chat",
    )
    add_unsupported_arguments(parser, UNSUPPORTED)
    parser.add_argument(
        "--verbose",
        type=boolean,
        default=True,
        help="Print a summary on stderr (default: True); 'False' or 'F' prints only the response",
    )
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    return setup_arg_parser().parse_args(argv)
