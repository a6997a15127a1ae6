"""Generation: the Python functions, and the command of the same name."""

from ..decode.generate import dflash_generate_step, generate, stream_generate
from .command import main, setup_arg_parser

__all__ = ["dflash_generate_step", "generate", "main", "setup_arg_parser", "stream_generate"]
