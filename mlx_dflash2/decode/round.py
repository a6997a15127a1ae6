"""One round: a target pass over a block of each sequence, until it is settled."""

from collections.abc import Iterator
from collections.abc import Sequence as Rows
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from ..drafter.model import Proposal
from ..targets import Forward
from .judge import Decision
from .rollback import Transaction
from .sequence import Sequence


@dataclass
class Round:
    """One target pass over a block of each sequence, and what keeps only some of its rows.

    ``inputs`` [B, W] are anchors and drafts, shorter blocks padded; ``logits`` [B, W, V] the
    target's own; ``decisions`` one a sequence, once the round has been read; ``extended`` tells
    whether the drafter has its rows.
    """

    sequences: list[Sequence]
    proposals: list[Proposal]
    inputs: mx.array
    out: Forward
    logits: mx.array
    transaction: Transaction
    decisions: list[Decision] = field(default_factory=list)
    seconds: float = 0.0
    extended: bool = False

    @property
    def width(self) -> int:
        """Rows of the pass for each sequence."""
        return self.inputs.shape[1]

    @property
    def states(self) -> list[Any]:
        """What the pass left in caches of keys and values; recurrent states wait for the commit."""
        return [c.state for c in self.transaction.layers if not isinstance(c, ArraysCache)]

    @property
    def rows_of_logits(self) -> list[mx.array]:
        """Each sequence's logits [L + 1, V] of its anchor and its L drafts."""
        return [
            rows if 1 + p.tokens.size == rows.shape[0] else rows[: 1 + p.tokens.size]
            for rows, p in zip(self.logits, self.proposals, strict=True)
        ]


class Ahead(NamedTuple):
    """Drafts that were begun before their round, and the seconds that this took the host."""

    proposals: list[Proposal]
    seconds: float


def blocks(anchors: mx.array, proposals: Rows[Proposal]) -> mx.array:
    """Each sequence's anchor and drafts [B, W]; shorter ones are padded."""
    most = max(proposal.tokens.size for proposal in proposals)
    if most == 0:
        return anchors[:, None]
    if len(proposals) == 1:
        return mx.concatenate([anchors, proposals[0].tokens])[None]
    drafts = [mx.pad(p.tokens, (0, most - p.tokens.size)) for p in proposals]
    return mx.concatenate([anchors[:, None], mx.stack(drafts)], axis=1)


@contextmanager
def aborting(transaction: Transaction) -> Iterator[None]:
    """Put the caches back if the pass fails."""
    try:
        yield
    except BaseException:
        transaction.abort()
        raise
