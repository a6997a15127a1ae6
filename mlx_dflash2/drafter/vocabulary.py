"""A drafter that drafts only frequent tokens reads less of its target's head."""

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn

from ..targets.shape import TargetHead


class PartedHead(TargetHead, Protocol):
    """A target whose head can be read in part."""

    @property
    def head_module(self) -> nn.Module:
        """The module of the head."""

    def narrow_head(self, ids: mx.array) -> nn.Module:
        """Return the head's module with the rows of some token ids."""

    def head(self, hidden: mx.array, part: nn.Module | None = None) -> mx.array:
        """Compute raw logits of the drafter's rows, with such a module or the whole head."""


class FrequentTokens:
    """The only ids that a drafter drafts. Verification uses the target's whole head.

    Args:
        ids (sequence of int): At least one; their order does not matter.

    Raises:
        ValueError: if there is none, or a negative one.
    """

    def __init__(self, ids: Sequence[int]):
        self.ids = sorted(set(ids))
        if not self.ids or self.ids[0] < 0:
            raise ValueError("`draft_vocab` has to name at least one id, and none below 0.")
        # The rows of the last target's head, with the matrix that they were picked from.
        self._part: tuple[mx.array, nn.Module, mx.array] | None = None

    def coverage(self, tokens: Sequence[int]) -> float:
        """The share of a text's tokens that may be drafted."""
        known = set(self.ids)
        return sum(token in known for token in tokens) / max(1, len(tokens))

    def head_of(self, target: PartedHead, size: int) -> "FrequentHead":
        """Pick the rows of a target's head, of ids below ``size``.

        Raises:
            ValueError: if the largest id is not below.
        """
        if self.ids[-1] >= size:
            raise ValueError(
                f"`draft_vocab` names token {self.ids[-1]} but has to name tokens from 0 to "
                f"{size - 1}."
            )
        weight = target.head_module.weight
        if self._part is None or self._part[0] is not weight:
            ids = mx.array(self.ids, mx.uint32)
            part = target.narrow_head(ids)
            # Every generator reads these rows, perhaps on another thread.
            mx.eval(part.parameters(), ids)
            self._part = weight, part, ids
        return FrequentHead(target, *self._part[1:])


class FrequentHead:
    """A target's embedding, and its head over some ids: column i is id ``draft_ids[i]``."""

    def __init__(self, target: PartedHead, part: nn.Module, draft_ids: mx.array):
        self.target, self.part, self.draft_ids = target, part, draft_ids

    @property
    def vocab_size(self) -> int:
        """Rows of the whole head."""
        return self.target.vocab_size

    def embed(self, tokens: mx.array) -> mx.array:
        """Embed token ids as the target does."""
        return self.target.embed(tokens)

    def head(self, hidden: mx.array) -> mx.array:
        """Compute raw logits of the ids."""
        return self.target.head(hidden, self.part)
