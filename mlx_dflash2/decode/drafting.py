"""Drafting for a loop: a failure of the drafter goes no further than here."""

from collections.abc import Sequence as Rows

import mlx.core as mx

from ..drafter.logits import drafted_vocab_size
from ..drafter.model import Drafter, Proposal, Proposer
from ..drafter.vocabulary import FrequentHead
from ..targets import Target
from .batch.draft import extend_rows, propose_rows
from .clock import SELECT, Clock
from .guard import DraftGuard
from .sequence import Sequence


class Drafting:
    """Asks a drafter for drafts, and hands it the rows that were kept.

    Args:
        proposer (Proposer, optional): The drafter, if there is one.
        target (Target): Lends it embedding and head.
        block_size (int): Rows of its block.
        guard (DraftGuard): Takes its errors.
        clock (Clock, optional): Takes the times.
    """

    def __init__(
        self,
        proposer: Proposer | None,
        target: Target,
        block_size: int,
        guard: DraftGuard,
        clock: Clock | None = None,
    ):
        self.proposer, self.target, self.block_size = proposer, target, block_size
        self.head: Target | FrequentHead = target
        if isinstance(proposer, Drafter) and proposer.frequent_tokens is not None:
            size = drafted_vocab_size(target, proposer.args)
            self.head = proposer.frequent_tokens.head_of(target, size)
        self.guard, self.clock = guard, clock

    def propose(
        self,
        sequences: list[Sequence],
        anchors: mx.array,
        widths: Rows[int],
        histories: Rows[mx.array | None],
        lazy: bool = False,
    ) -> list[Proposal]:
        """Draft for every sequence that has room.

        Args:
            sequences (list): Those to decode.
            anchors (mx.array): Their anchors [B].
            widths (sequence): Rows that each one's block may have.
            histories (sequence): All tokens up to the anchor, where there are processors.
            lazy (bool): Leave the drafts unevaluated. Default: ``False``.

        Returns:
            list of Proposal: One for each sequence, empty where the drafter failed.
        """
        proposals = [Proposal.none() for _ in sequences]
        # A sequence with room for one token takes no key, as on its own.
        places = [index for index, width in enumerate(widths) if width > 1]
        if not places or self.proposer is None or not self.guard.on:
            return proposals
        drafting = [sequences[index] for index in places]
        # Our own drafter takes its tokens from the target's head.
        known = None if isinstance(self.proposer, Drafter) else self.target.num_embeddings
        with self.guard.step():
            found = propose_rows(
                self.proposer,
                self.head,
                anchors if len(places) == len(sequences) else anchors[mx.array(places)],
                [sequence.drafter_context for sequence in drafting],
                self.block_size,
                [sequence.judge for sequence in drafting],
                [histories[index] for index in places],
                self.clock,
            )
            found = [
                usable(proposal, widths[index] - 1, known)
                for index, proposal in zip(places, found, strict=True)
            ]
            # The drafter runs while the target's graph is built; launch errors show here.
            if not lazy:
                mx.async_eval([x for proposal in found for x in proposal if x is not None])
            for index, proposal in zip(places, found, strict=True):
                proposals[index] = sequences[index].judge.cut(proposal)
        if self.clock is not None:
            self.clock.lap(SELECT, [[x for x in p if x is not None] for p in proposals])
        return proposals

    def extend(
        self,
        sequences: list[Sequence],
        inputs: mx.array,
        taps: mx.array | None,
        positions: Rows[int],
        keeps: Rows[int],
    ) -> None:
        """Hand the drafter the rows that a pass over ``inputs`` left in the caches."""
        if self.proposer is None or not self.guard.on:
            return
        rows = [b for b, sequence in enumerate(sequences) if sequence.drafts]
        if not rows:
            return
        if len(rows) < len(sequences):
            inputs = inputs[mx.array(rows)]
            taps = None if taps is None else taps[mx.array(rows)]
        contexts = [sequences[b].drafter_context for b in rows]
        positions, keeps = ([numbers[b] for b in rows] for numbers in (positions, keeps))
        with self.guard.step():
            extend_rows(self.proposer, contexts, inputs, taps, positions, keeps)


def usable(proposal: Proposal, count: int, known: int | None = None) -> Proposal:
    """The first drafts of a proposal, as the target reads them.

    Ids from ``known`` on become another one, and the proposal not finite.

    Raises:
        ValueError: if they are not a row of ids.
    """
    proposal = proposal.first(count)
    if proposal.tokens.ndim != 1:
        raise ValueError(f"drafts have to be [L] but are {list(proposal.tokens.shape)}")
    tokens = proposal.tokens.astype(mx.uint32)
    if known is None:
        return proposal._replace(tokens=tokens)
    finite = proposal.finite & (tokens < known).all()
    return proposal._replace(tokens=mx.minimum(tokens, known - 1), finite=finite)
