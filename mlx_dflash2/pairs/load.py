"""Load a pair that was found."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..checkpoint.load import device_dtype, read_drafter
from ..checkpoint.target import read_target
from ..drafter.model import Drafter
from .find import PairSources


@dataclass
class Pair:
    """A target with its tokenizer, and the drafter for it; ``name`` is the target's."""

    name: str
    model: nn.Module
    tokenizer: TokenizerWrapper
    drafter: Drafter


def load_pair(sources: PairSources, *, lazy: bool = False, **load_kwargs: Any) -> Pair:
    """Read the weights of a pair, after all files of both have been checked.

    Args:
        sources (PairSources): From :func:`find_pair`.
        lazy (bool): Leave the weights unread until they are needed. Default: ``False``.
        load_kwargs: For the target, as for :func:`mlx_dflash2.load`.

    Raises:
        FileNotFoundError: if a weight file is missing.
        ValueError: if weights are damaged, or the drafter's do not match its config.
    """
    model, tokenizer, *_ = read_target(sources.target, lazy=True, **load_kwargs)
    drafter = read_drafter(
        sources.drafter, bits=sources.draft_bits, dtype=device_dtype(), lazy=lazy
    )
    if not lazy:
        mx.eval(model.parameters())
    return Pair(sources.target.name, model, tokenizer, drafter)
