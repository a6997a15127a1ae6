"""A rule about which tokens may follow, known for a whole block before it is judged."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from .host import integers


class Constraint(ABC):
    """Says which tokens may come next, for one sequence; given among the logits processors.

    A processor of mlx-lm's kind sees one row at a time and may keep a state, so its rows are
    judged one after the other. A constraint tells the masks of all rows of a block at once, from
    the drafts before them, and what it forbids is not even verified.

    Attributes:
        vocab_size (int): Tokens that it knows, which is the target's number.
        problem (str, optional): Why it gave up, if it did; then the answer has to end.
    """

    vocab_size: int
    problem: str | None = None
    _seen: int | None = None

    @abstractmethod
    def forced(self, most: int) -> list[int]:
        """Tokens that have to come next, at most so many; empty if there is a choice."""

    @abstractmethod
    def allowed(self, drafts: Sequence[int]) -> int:
        """How many drafts may follow one after the other."""

    @abstractmethod
    def masks(self, drafts: Sequence[int]) -> np.ndarray:
        """Which tokens may follow the accepted ones, and each of some allowed drafts.

        Returns:
            np.ndarray: uint32 [L + 1, ceil(V / 32)]; bit i of word w is token 32 w + i.
        """

    @abstractmethod
    def accept(self, tokens: Sequence[int]) -> None:
        """Go on to the place behind tokens that were emitted."""

    def apply(self, logits: mx.array, drafts: Sequence[int]) -> mx.array:
        """Mask rows [L + 1, V] of logits: the anchor's, and one for each of L allowed drafts."""
        words = mx.array(self.masks(drafts))[..., None]
        bits = (words >> mx.arange(32, dtype=mx.uint32)) & 1
        mask = bits.reshape(logits.shape[0], -1)[:, : logits.shape[1]].astype(mx.bool_)
        return mx.where(mask, logits, -mx.inf)

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Mask one row in mlx-lm's own loops, where each call follows one more token."""
        if self._seen is not None:
            self.accept(integers(tokens[self._seen :]))
        self._seen = tokens.size
        return self.apply(logits, [])
