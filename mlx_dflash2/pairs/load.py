"""Load a pair that was found."""

from dataclasses import dataclass
from typing import Any

import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..checkpoint.load import device_dtype, read_drafter, read_target
from ..drafter.model import Drafter
from .find import PairSources


@dataclass
class Pair:
    """A target with its tokenizer, and the drafter for it; ``name`` is the target's."""

    name: str
    model: nn.Module
    tokenizer: TokenizerWrapper
    drafter: Drafter


def load_pair(sources: PairSources, **load_kwargs: Any) -> Pair:
    """Read the weights of a pair.

    Args:
        sources (PairSources): From :func:`find_pair`.
        load_kwargs: For the target, as for :func:`mlx_dflash2.load`.

    Raises:
        FileNotFoundError: if a weight file is missing.
        ValueError: if weights are damaged, or the drafter's do not match its config.
    """
    # The drafter is smaller: an error in its files shows before the target is read.
    drafter = read_drafter(sources.drafter, bits=sources.draft_bits, dtype=device_dtype())
    model, tokenizer, *_ = read_target(sources.target, **load_kwargs)
    return Pair(sources.target.name, model, tokenizer, drafter)
