"""Lossless DFlash 2 speculative decoding for mlx-lm.

The names below are imported when they are first used.
"""

from typing import TYPE_CHECKING

from . import generate as _generate_command
from ._version import __version__
from .lazy import lazy_names

if TYPE_CHECKING:
    from . import embedded
    from .checkpoint.load import load_drafter
    from .checkpoint.target import load
    from .copies import CopyProposer
    from .decode.batch.generate import batch_generate
    from .decode.generate import dflash_generate_step, generate, stream_generate
    from .decode.sampling import make_logits_processors, make_sampler
    from .decode.session import DFlashPromptCache
    from .decode.stats import Stats
    from .drafter import Proposal, Proposer
else:
    # The function has the name of the command's package. Imported here, the package is not bound
    # to that name again, so the name stays free for the function.
    del generate, _generate_command

__all__ = [
    "CopyProposer",
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

__getattr__ = lazy_names(
    __name__,
    {
        "CopyProposer": ".copies",
        "DFlashPromptCache": ".decode.session",
        "Proposal": ".drafter",
        "Proposer": ".drafter",
        "Stats": ".decode.stats",
        "batch_generate": ".decode.batch.generate",
        "dflash_generate_step": ".decode.generate",
        "embedded": ".embedded",
        "generate": ".decode.generate",
        "load": ".checkpoint.target",
        "load_drafter": ".checkpoint.load",
        "make_logits_processors": ".decode.sampling",
        "make_sampler": ".decode.sampling",
        "stream_generate": ".decode.generate",
    },
)
