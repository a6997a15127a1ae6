"""Generation: the Python functions, and the command of the same name."""

from typing import TYPE_CHECKING

from ..lazy import lazy_names

if TYPE_CHECKING:
    from ..decode.generate import dflash_generate_step, generate, stream_generate

__all__ = ["dflash_generate_step", "generate", "stream_generate"]
__getattr__ = lazy_names(__name__, dict.fromkeys(__all__, "..decode.generate"))
