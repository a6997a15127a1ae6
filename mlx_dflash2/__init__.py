"""Lossless DFlash 2 speculative decoding for mlx-lm."""

from ._version import __version__
from .generate import generate, stream_generate
from .load import load, load_drafter
from .prompt_cache import DFlashPromptCache
from .sampling import make_logits_processors, make_sampler
from .stats import Stats

__all__ = [
    "DFlashPromptCache",
    "Stats",
    "__version__",
    "generate",
    "load",
    "load_drafter",
    "make_logits_processors",
    "make_sampler",
    "stream_generate",
]
