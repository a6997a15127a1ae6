"""The plan of a round: how many rows each sequence has, and who copies and who drafts."""

from collections.abc import Sequence as Rows
from typing import NamedTuple

from ..copies import Copy
from ..drafter.proposal import Proposal
from .controller import Controller
from .sequence import Sequence


class Plan(NamedTuple):
    """What each sequence does in a round.

    Attributes:
        widths (list of int): The most rows of its block, the anchor's included.
        copies (list): Its copied drafts, perhaps none; ``None`` leaves them to the drafter.
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
        context.offer(anchor, min(max_copied, int(min(widest, budget)) - 1))
        for context, anchor, budget in _copying(sequences, budgets)
        if widest > 1
    ]
    width = widest
    if controller is not None and widest > 1:
        width = controller.choose(widest, len(budgets)) if drafts else 1
        copied = controller.choose_copies([c.chances for c in copies], widest, width)
        if copied > 1:
            width, drafts = copied, False
    widths = [int(min(width, budget)) for budget in budgets]
    if not copies:
        return Plan(widths, [None] * len(widths))
    copies = [copy.first(w - 1) for copy, w in zip(copies, widths, strict=True)]
    return Plan(widths, [
        None if drafts and w > 1 and context.leaves_to_drafter(copy, w - 1) else copy
        for (context, _, w), copy in zip(_copying(sequences, widths), copies, strict=True)
    ])  # fmt: skip


def offers_copies(sequences: Rows[Sequence], anchors: Rows[int]) -> bool:
    """Tell whether any sequence has something to copy after its coming anchor."""
    return any(
        sequence.copies is not None and sequence.copies.offer(anchor, 1).tokens
        for sequence, anchor in zip(sequences, anchors, strict=True)
    )


def _copying(sequences: Rows[Sequence], numbers: Rows[float]) -> list[tuple]:
    """The context and the anchor of each sequence that may copy, and its number."""
    return [
        (sequence.copies, sequence.anchor, number)
        for sequence, number in zip(sequences, numbers, strict=True)
        if sequence.copies is not None
    ]
