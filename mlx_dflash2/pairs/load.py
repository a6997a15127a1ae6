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
from ..drafter.model import Drafter
from .find import PairSources


def pending_downloads(sources: PairSources) -> list[Download]:
    """Tell what is still to be downloaded of a pair, as :func:`pending_download`."""
    files = ((sources.drafter, DRAFTER_FILES), (sources.target, DEFAULT_ALLOW_PATTERNS))
    found = [pending_download(source, patterns) for source, patterns in files]
    return [download for download in found if download is not None]


def fetch_pair(sources: PairSources) -> tuple[Path, Path]:
    """Download what is missing of a pair; return the folders of target and drafter.

    Raises:
        FileNotFoundError: if the hub cannot give a file.
    """
    return sources.target.fetch(DEFAULT_ALLOW_PATTERNS), sources.drafter.fetch(DRAFTER_FILES)


@dataclass
class Pair:
    """A target with its tokenizer, and the drafter for it; ``name`` is the target's."""

    name: str
    model: nn.Module
    tokenizer: TokenizerWrapper
    drafter: Drafter


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
    for_gpu = mx.default_device() == mx.gpu if for_gpu is None else for_gpu
    bits = bits_at_load(sources.draft_bits, sources.drafter, for_gpu)
    dtype = None if for_gpu else device_dtype()
    drafter = read_drafter(sources.drafter, bits=bits, dtype=dtype, lazy=lazy)
    if not lazy:
        mx.eval(model.parameters())
    return Pair(sources.target.name, model, tokenizer, drafter)
