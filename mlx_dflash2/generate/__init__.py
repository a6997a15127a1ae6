"""Generation: the Python functions, and the command of the same name."""

from ..decode.generate import dflash_generate_step, generate, stream_generate

__all__ = ["dflash_generate_step", "generate", "stream_generate"]
