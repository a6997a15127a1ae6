"""Load a pair that was found."""

from dataclasses import dataclass
from typing import Any

import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..checkpoint.load import device_dtype, read_drafter, read_target
from ..copies import CopyProposer, without_copies
from ..drafter.model import Drafter, Proposer
from .find import PairSources


@dataclass
class Pair:
    """A target with its tokenizer, and what drafts for it.

    Attributes:
        name (str): The target's.
        model (nn.Module): The target.
        tokenizer (TokenizerWrapper): The target's.
        proposer (Proposer): The drafter, or copies with it or without one.
    """

    name: str
    model: nn.Module
    tokenizer: TokenizerWrapper
    proposer: Proposer

    @property
    def drafter(self) -> Drafter:
        """Return the drafter.

        Raises:
            ValueError: if there are only copies.
        """
        drafter = without_copies(self.proposer)
        if not isinstance(drafter, Drafter):
            raise ValueError("`copy_drafts` is only but a drafter is needed.")
        return drafter


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
    drafter = None
    if sources.draft_model is not None:
        drafter = read_drafter(sources.drafter, bits=sources.draft_bits, dtype=device_dtype())
    model, tokenizer, *_ = read_target(sources.target, **load_kwargs)
    proposer = CopyProposer(drafter) if drafter is None or sources.copies else drafter
    return Pair(sources.target.name, model, tokenizer, proposer)
