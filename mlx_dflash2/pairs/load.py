"""The pair of models that a command works with."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .. import embedded
from ..checkpoint.load import check_target, load, load_drafter, read_drafter_args
from ..cli.console import note
from ..copies import MAX_DRAFTS, CopyProposer, without_copies
from ..decode.loop import check_widths
from ..drafter.model import Drafter, Proposer
from .known import default_drafter, mismatch_note

EMBEDDED_NOTE = (
    "No --model: this is the embedded pair, SmolLM2-135M-Instruct with its drafter. For "
    "Qwen3.8-27B: mlx_dflash2.generate --model mlx-community/Qwen3.8-27B-4bit"
)


@dataclass
class Pair:
    """A target with its tokenizer, and what drafts for it; ``name`` is the target's.

    ``proposer`` is the drafter, or copies with or without it.
    """

    name: str
    model: nn.Module
    tokenizer: TokenizerWrapper
    proposer: Proposer

    @property
    def drafter(self) -> Drafter:
        """The drafter.

        Raises:
            ValueError: if there are only copies.
        """
        drafter = without_copies(self.proposer)
        if not isinstance(drafter, Drafter):
            raise ValueError("`copy_drafts` is 'only': there is no drafter.")
        return drafter


def pair_paths(model: str | None, draft_model: str | Path | None) -> tuple[str, str | Path]:
    """Where target and drafter come from, the embedded pair if no target is named.

    Raises:
        FileNotFoundError: if the target, or the package of the embedded one, is not there.
        ValueError: if the target is a drafter, or no drafter is known for it.
    """
    if model is None:
        model = str(embedded.target_path())
    check_target(model)
    if not draft_model:
        # Also where the folder is named, as a saved prompt cache names it.
        found = embedded.is_target(model)
        draft_model = embedded.drafter_path() if found else default_drafter(model)
    return model, draft_model


def load_pair(
    model: str | None,
    draft_model: str | None,
    *,
    draft_bits: int | None = None,
    block_size: int | None = None,
    verify_width: int | None = None,
    copy_drafts: str = "off",
    **load_kwargs: Any,
) -> Pair:
    """Load a target and its drafter, the embedded pair if no target is named.

    Args:
        model (str, optional): Folder or repository of the target.
        draft_model (str, optional): Folder or repository of the drafter; it may be left out for
            a known target.
        draft_bits (int, optional): Quantise the drafter at load, 4 or 8.
        block_size, verify_width (int, optional): To be checked before weights are read.
        copy_drafts (str): ``with`` also drafts copies of the text so far; ``only`` drafts nothing
            else, and there is no drafter. Default: ``off``.
        load_kwargs: Passed to :func:`mlx_dflash2.load`.

    Raises:
        FileNotFoundError, ValueError: as :func:`mlx_dflash2.load_drafter`.
    """
    if model is None:
        note(EMBEDDED_NOTE)
    if copy_drafts == "only":
        given = {"draft_model": draft_model, "draft_bits": draft_bits, "block_size": block_size}
        return _load_without_drafter(model, verify_width, given, load_kwargs)
    copies = MAX_DRAFTS if copy_drafts == "with" else 0
    model, draft_model = pair_paths(model, draft_model)
    check_widths(read_drafter_args(draft_model).block_size, block_size, verify_width, copies)
    # Bfloat16 is emulated on MLX's CPU backend, several times slower than float32.
    dtype = mx.float32 if mx.default_device() == mx.cpu else None
    # The drafter is the smaller one: what is wrong with it shows before the target is read.
    drafter = load_drafter(draft_model, bits=draft_bits, dtype=dtype)
    if (mismatch := mismatch_note(model, draft_model)) is not None:
        note(f"warning: {mismatch}")
    target, tokenizer = load(model, **load_kwargs)
    return Pair(model, target, tokenizer, CopyProposer(drafter) if copies else drafter)


def _load_without_drafter(
    model: str | None, verify_width: int | None, given: dict[str, Any], load_kwargs: dict[str, Any]
) -> Pair:
    """Load a target that only copies."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"`{name}` is {value} but `copy_drafts` is 'only': nothing uses it.")
    check_widths(1, None, verify_width, MAX_DRAFTS)
    model = str(embedded.target_path()) if model is None else model
    check_target(model)
    target, tokenizer = load(model, **load_kwargs)
    return Pair(model, target, tokenizer, CopyProposer())
