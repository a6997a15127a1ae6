"""Load a pair that was found."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

from ..checkpoint.download import Download, pending_download
from ..checkpoint.files import DRAFTER_FILES
from ..checkpoint.load import bits_at_load, device_dtype, read_drafter
from ..checkpoint.target import read_target
from ..copies import CopyProposer, without_copies
from ..drafter.model import Drafter, Proposer
from .find import PairSources


def pending_downloads(sources: PairSources) -> list[Download]:
    """Tell what is still to be downloaded of a pair, as :func:`pending_download`."""
    found = [pending_download(sources.target, DEFAULT_ALLOW_PATTERNS)]
    if sources.draft_model is not None:
        found.insert(0, pending_download(sources.draft_model, DRAFTER_FILES))
    return [download for download in found if download is not None]


def fetch_pair(sources: PairSources) -> tuple[Path, Path]:
    """Download what is missing of a pair; return the folders of target and drafter.

    Raises:
        FileNotFoundError: if the hub cannot give a file.
    """
    return sources.target.fetch(DEFAULT_ALLOW_PATTERNS), sources.drafter.fetch(DRAFTER_FILES)


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
    def models(self) -> list[nn.Module]:
        """Return the target, and the drafter if there is one."""
        drafter = without_copies(self.proposer)
        return [self.model, drafter] if isinstance(drafter, Drafter) else [self.model]

    @property
    def most_rows(self) -> int:
        """Return the most rows of a verify pass."""
        copied = self.proposer.max_drafts if isinstance(self.proposer, CopyProposer) else 0
        return max(self.proposer.block_size, copied + 1)

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


def load_pair(
    sources: PairSources, *, lazy: bool = False, for_gpu: bool | None = None, **load_kwargs: Any
) -> Pair:
    """Read the weights of a pair, after all files of both have been checked.

    Args:
        sources (PairSources): From :func:`find_pair`.
        lazy (bool): Leave the weights unread until they are needed. Default: ``False``.
        for_gpu (bool, optional): Read the drafter as it is on a GPU, or on the CPU backend.
            Default: as the default device has it.
        load_kwargs: For the target, as for :func:`mlx_dflash2.load`.

    Raises:
        FileNotFoundError: if a weight file is missing.
        ValueError: if weights are damaged, or the drafter's do not match its config.
    """
    model, tokenizer, *_ = read_target(sources.target, lazy=True, **load_kwargs)
    drafter, gpu = None, mx.default_device() == mx.gpu if for_gpu is None else for_gpu
    if sources.draft_model is not None:
        bits = bits_at_load(sources.draft_bits, sources.draft_model, gpu)
        dtype = None if gpu else device_dtype()
        drafter = read_drafter(sources.draft_model, bits=bits, dtype=dtype, lazy=lazy)
    if not lazy:
        mx.eval(model.parameters())
    proposer = CopyProposer(drafter) if drafter is None or sources.copies else drafter
    return Pair(sources.target.name, model, tokenizer, proposer)
