"""Lossless DFlash 2 speculative decoding for mlx-lm."""

from ._version import __version__
from .checkpoint.load import load, load_drafter
from .copies import CopyProposer
from .decode.batch.generate import batch_generate
from .decode.sampling import make_logits_processors, make_sampler
from .decode.session import DFlashPromptCache
from .decode.stats import Stats
from .generate import generate, stream_generate

__all__ = [
    "CopyProposer",
    "DFlashPromptCache",
    "Stats",
    "__version__",
    "batch_generate",
    "generate",
    "load",
    "load_drafter",
    "make_logits_processors",
    "make_sampler",
    "stream_generate",
]
