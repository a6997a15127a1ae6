"""Repairs to try on a drafter that drafts badly: each undoes one known mistake."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..drafter import variants
from ..drafter.model import Drafter
from ..evaluation.teacher_forced import DraftQuality

# Early drafts decide: one four positions later counts e times less, as in training.
ROW_DECAY = 4.0


@dataclass(frozen=True, eq=False)
class Trial:
    """A drafter with one thing changed.

    Attributes:
        stage (str): What is at fault if this helps.
        change (str): What was changed.
        drafter (Drafter): The changed one.
        of_selector (bool): Whether to judge the selector's choices instead of the logits.
    """

    stage: str
    change: str
    drafter: Drafter
    of_selector: bool = False

    def gains(self, before: DraftQuality, after: DraftQuality, most: float = np.inf) -> np.ndarray:
        """Compute what the true tokens' log probability gains at each anchor, in nats.

        ``most`` limits what a single token may gain or lose.
        """
        if self.of_selector:
            # An anchor without any true candidate says nothing about the selector.
            difference = (after.selector_logprob - before.selector_logprob).clip(-most, most)
            weights = np.where(np.isnan(difference), 0.0, 1.0)
            keep = weights.sum(axis=1) > 0
            return np.nansum(difference[keep], axis=1) / weights[keep].sum(axis=1)
        difference = (after.logprob - before.logprob).clip(-most, most)
        weights = np.exp(-np.arange(difference.shape[1]) / ROW_DECAY)
        return difference @ (weights / weights.sum())


def make_trials(drafter: Drafter, mask_ids: Iterable[int], num_layers: int) -> list[Trial]:
    """Make every repair that this drafter allows.

    Args:
        drafter (Drafter): The suspect.
        mask_ids (iterable of int): Ids that may be the true mask.
        num_layers (int): Of the target; a drafter's config need not say how many it has.
    """
    return [*_wiring(drafter, num_layers), *_masks(drafter, mask_ids), *_selector(drafter)]


def _wiring(drafter: Drafter, num_layers: int) -> Iterator[Trial]:
    args = drafter.args
    for shift, way in ((-1, "one layer earlier"), (1, "one layer later")):
        shifted = variants.with_taps(drafter, shift, num_layers)
        if shifted is not None:
            yield Trial("target_layer_ids", f"taps {way}: {shifted.target_layer_ids}", shifted)
    if args.has_conv:
        swapped = variants.with_conv_sides_swapped(drafter)
        yield Trial("convolution", "its two sides swapped", swapped)
    flipped = variants.with_rope_pairing_flipped(drafter)
    yield Trial("rope", f"rope_is_neox_style {not flipped.args.rope_traditional}", flipped)
    causal = variants.with_causal_flipped(drafter)
    yield Trial("is_causal", f"is_causal {causal.args.causal}", causal)
    if drafter.dtype != mx.float32:
        weights = {
            name: value.astype(mx.float32) if mx.issubdtype(value.dtype, mx.floating) else value
            for name, value in variants.parameters(drafter).items()
        }
        yield Trial("dtype", "computed in float32", variants.variant(drafter, weights))


def _masks(drafter: Drafter, mask_ids: Iterable[int]) -> Iterator[Trial]:
    for token in dict.fromkeys(mask_ids):
        if token != drafter.args.mask_token_id:
            masked = variants.with_mask_id(drafter, token)
            yield Trial("mask_token_id", f"mask_token_id {token}", masked)


def _selector(drafter: Drafter) -> Iterator[Trial]:
    if drafter.args.has_selector:
        swapped = variants.with_codebooks_swapped(drafter)
        yield Trial("candidate_selector", "its two codebooks swapped", swapped, of_selector=True)


def likely_masks(tokenizer: TokenizerWrapper, vocab_size: int) -> list[int]:
    """List ids that trainers use as masks: special tokens, and padding rows of the embedding."""
    special = sorted(tokenizer.all_special_ids) + sorted(tokenizer.added_tokens_decoder)
    first = max([len(tokenizer), *(token + 1 for token in special)])
    padding = [*range(first, first + 4), vocab_size - 1]
    return [token for token in dict.fromkeys(special + padding) if 0 <= token < vocab_size]
