"""What a drafter gives to the decoding loop, and what the loop asks of a drafter."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from ..targets import Target


class Proposal(NamedTuple):
    """Draft tokens for the positions after the anchor.

    Attributes:
        tokens (mx.array): Ids [L].
        finite (mx.array): A boolean; false if the drafter's numbers overflowed.
        candidates (mx.array, optional): For drafts drawn at random, the ids [L, K] that each was
            drawn from.
        q (mx.array, optional): The candidates' probabilities [L, K], float32.
        copied (bool): Whether the drafts are not a drafter's: they are from the text so far, or
            nothing else is allowed.
    """

    tokens: mx.array
    finite: mx.array
    candidates: mx.array | None = None
    q: mx.array | None = None
    copied: bool = False

    @classmethod
    def none(cls) -> "Proposal":
        """Propose nothing: a plain step."""
        return cls(mx.array([], mx.uint32), mx.array(True))

    def first(self, count: int) -> "Proposal":
        """Keep the first ``count`` drafts."""
        return self._slice(slice(count))

    def only(self, index: int) -> "Proposal":
        """Keep one draft, or none if there are not so many."""
        return self._slice(slice(index, index + 1))

    def _slice(self, at: slice) -> "Proposal":
        candidates, q = (None if x is None else x[at] for x in (self.candidates, self.q))
        return self._replace(tokens=self.tokens[at], candidates=candidates, q=q)


class Proposer(Protocol):
    """What the decoding loop asks of a drafter; anything that offers this can draft.

    A context with a method ``read(tokens, position)`` is shown the ids of all committed tokens, as
    a list of integers, those of rows before ``context_size`` included.
    """

    @property
    def block_size(self) -> int:
        """Rows of a block, the anchor's included."""

    @property
    def target_layer_ids(self) -> Sequence[int]:
        """The target's layers whose outputs it reads, increasing; may be empty."""

    @property
    def context_size(self) -> int | None:
        """How many of the latest committed rows it can use; ``None`` for all."""

    def make_context(self) -> Any:
        """Make a fresh context for one sequence."""

    def extend(self, context: Any, tokens: mx.array, taps: mx.array | None, position: int) -> None:
        """Take in committed tokens [S] and their taps [1, S, T * H], from an absolute position."""

    def propose(
        self,
        target: Target,
        anchor: mx.array,
        context: Any,
        block_size: int,
        temperature: float = 0.0,
        key: mx.array | None = None,
    ) -> Proposal:
        """Draft ``block_size - 1`` tokens to follow the anchor, an id of shape [1].

        Above temperature 0 a drafter may draw with ``key``, and then gives its ``q``; drafts
        without one count as certain.
        """
