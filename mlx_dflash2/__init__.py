"""Lossless DFlash 2 speculative decoding for mlx-lm."""

from . import embedded
from ._version import __version__
from .checkpoint.load import load, load_drafter
from .decode.batch.generate import batch_generate
from .decode.sampling import make_logits_processors, make_sampler
from .decode.session import DFlashPromptCache
from .decode.stats import Stats
from .drafter import Proposal, Proposer
from .generate import dflash_generate_step, generate, stream_generate

__all__ = [
    "DFlashPromptCache",
    "Proposal",
    "Proposer",
    "Stats",
    "__version__",
    "batch_generate",
    "dflash_generate_step",
    "embedded",
    "generate",
    "load",
    "load_drafter",
    "make_logits_processors",
    "make_sampler",
    "stream_generate",
]
