"""Repairs to try on a drafter that drafts badly. Each undoes one known mistake."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..checkpoint.tensors import cast
from ..drafter import variants
from ..drafter.model import Drafter
from ..evaluation.teacher_forced import DraftQuality

# Early rows decide: a row four later counts e times less, as in training.
ROW_DECAY = 4.0


@dataclass(frozen=True, eq=False)
class Repair:
    """A drafter with one thing changed.

    Attributes:
        stage (str): The stage at fault if this helps.
        change (str): What is changed.
        drafter (Drafter): The changed drafter.
        of_selector (bool): Judge the selector's choices instead of the rows themselves.
    """

    stage: str
    change: str
    drafter: Drafter
    of_selector: bool = False

    def gains(self, before: DraftQuality, after: DraftQuality, most: float = np.inf) -> np.ndarray:
        """Return the gain of the true tokens' log probability at each anchor, in nats.

        Args:
            before, after (DraftQuality): Of the suspect and the changed drafter, anchor by anchor.
            most (float): The most that a single token may gain or lose.
        """
        if self.of_selector:
            # An anchor whose true tokens are not candidates says nothing about the selector.
            difference = (after.selector_logprob - before.selector_logprob).clip(-most, most)
            weights = np.where(np.isnan(difference), 0.0, 1.0)
            keep = weights.sum(axis=1) > 0
            return np.nansum(difference[keep], axis=1) / weights[keep].sum(axis=1)
        difference = (after.logprob - before.logprob).clip(-most, most)
        weights = np.exp(-np.arange(difference.shape[1]) / ROW_DECAY)
        return difference @ (weights / weights.sum())


def make_repairs(drafter: Drafter, mask_ids: Iterable[int], num_layers: int) -> list[Repair]:
    """Make every repair that applies to a drafter.

    Args:
        drafter (Drafter): The suspect.
        mask_ids (iterable of int): Ids to try as the mask.
        num_layers (int): The target's; a drafter's config may leave it out.
    """
    return list(_repairs(drafter, mask_ids, num_layers))


def _repairs(drafter: Drafter, mask_ids: Iterable[int], num_layers: int) -> Iterator[Repair]:
    args = drafter.args
    for shift, way in ((-1, "one layer earlier"), (1, "one layer later")):
        shifted = variants.with_taps(drafter, shift, num_layers)
        if shifted is not None:
            yield Repair("target_layer_ids", f"taps {way}: {shifted.target_layer_ids}", shifted)
    if args.has_conv:
        swapped = variants.with_conv_sides_swapped(drafter)
        yield Repair("convolution", "its two sides swapped", swapped)
    flipped = variants.with_rope_pairing_flipped(drafter)
    yield Repair("rope", f"rope_is_neox_style {not flipped.args.rope_traditional}", flipped)
    causal = variants.with_causal_flipped(drafter)
    yield Repair("is_causal", f"is_causal {causal.args.causal}", causal)
    if drafter.dtype != mx.float32:
        weights = dict(cast(variants.parameters(drafter), mx.float32))
        yield Repair("dtype", "computed in float32", variants.variant(drafter, weights))
    for token in dict.fromkeys(mask_ids):
        if token != args.mask_token_id:
            masked = variants.with_mask_id(drafter, token)
            yield Repair("mask_token_id", f"mask_token_id {token}", masked)
    if args.has_selector:
        swapped = variants.with_codebooks_swapped(drafter)
        yield Repair("candidate_selector", "its two codebooks swapped", swapped, of_selector=True)


def likely_masks(tokenizer: TokenizerWrapper, vocab_size: int) -> list[int]:
    """Return ids that trainers use as masks: special tokens and padding rows of the embedding."""
    special = sorted(tokenizer.all_special_ids) + sorted(tokenizer.added_tokens_decoder)
    first = max([len(tokenizer), *(token + 1 for token in special)])
    padding = [*range(first, first + 4), vocab_size - 1]
    return [token for token in dict.fromkeys(special + padding) if 0 <= token < vocab_size]
