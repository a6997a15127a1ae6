"""The plan of a round: how many rows each sequence has, and who copies and who drafts."""

from collections.abc import Sequence as Rows
from typing import NamedTuple, cast

from ..copies import Copy
from ..drafter.proposal import Proposal
from .controller import Controller
from .sequence import Sequence


class Plan(NamedTuple):
    """What each sequence does in a round.

    Attributes:
        widths (list of int): The most rows of its block, the anchor's included.
        copies (list): Its copied or forced drafts, perhaps none; ``None`` leaves them to the
            drafter.
    """

    widths: list[int]
    copies: list[Copy | None]

    @property
    def drafter_widths(self) -> list[int]:
        """The rows of each sequence's block that the drafter drafts, the anchor's included."""
        pairs = zip(self.widths, self.copies, strict=True)
        return [width if copy is None else 1 for width, copy in pairs]

    def with_copies(self, proposals: Rows[Proposal]) -> list[Proposal]:
        """Put copies in the places of those that the drafter left out."""
        pairs = zip(proposals, self.copies, strict=True)
        return [copy.proposal() if copy else proposal for proposal, copy in pairs]


def plan_round(
    sequences: Rows[Sequence],
    budgets: Rows[float],
    widest: int,
    max_copied: int,
    drafts: bool,
    controller: Controller | None,
) -> Plan:
    """Choose the width of a round, and who copies.

    Args:
        sequences (sequence): Those to decode.
        budgets (sequence): The most tokens to accept for each.
        widest (int): The most rows that caches and budgets allow.
        max_copied (int): The most drafts to copy; 0 where nothing is copied.
        drafts (bool): Whether the drafter may draft.
        controller (Controller, optional): Chooses the width; without one it is the widest.
    """
    copies = [
        _offer(sequence, int(min(widest, budget)) - 1, max_copied)
        for sequence, budget in zip(sequences, budgets, strict=True)
    ]
    width, copied = widest, 1
    if controller is not None and widest > 1:
        width = controller.choose(widest, len(budgets)) if drafts else 1
        copied = controller.choose_copies([c.chances for c in copies], widest, width)
        width = copied if copied > 1 else width
    # The draws of a seed do not depend on what others do.
    widths = [
        int(min(width if sequence.adaptive else widest, budget))
        for sequence, budget in zip(sequences, budgets, strict=True)
    ]
    return Plan(widths, [
        _copy(sequence, copy.first(w - 1), w, drafts and not (copied > 1 and sequence.adaptive))
        for sequence, copy, w in zip(sequences, copies, widths, strict=True)
    ])  # fmt: skip


def offers_copies(sequences: Rows[Sequence], anchors: Rows[int]) -> bool:
    """Tell whether any sequence has something to copy after its coming anchor."""
    return any(
        sequence.copies is not None and sequence.copies.offer(anchor, 1).tokens
        for sequence, anchor in zip(sequences, anchors, strict=True)
    )


def _offer(sequence: Sequence, most: int, max_copied: int) -> Copy:
    """What a sequence may do without the drafter: what is forced, or else a copy."""
    forced = sequence.judge.forced(most)
    if forced or sequence.copies is None or most < 1:
        return Copy(forced, [1.0] * len(forced))
    copy = sequence.copies.offer(cast(int, sequence.anchor), min(max_copied, most))
    return copy.first(sequence.judge.allowed(copy.tokens))


def _copy(sequence: Sequence, copy: Copy, width: int, drafts: bool) -> Copy | None:
    """What it does without the drafter; ``None`` leaves the round to that."""
    if sequence.copies is None or sequence.judge.forced(1):
        return copy if copy.tokens or not drafts else None
    left = drafts and width > 1 and sequence.copies.leaves_to_drafter(copy, width - 1)
    return None if left else copy
