"""One sequence being decoded: all that belongs to it alone."""

from typing import Any

import mlx.core as mx

from ..copies import CopyContext
from .judge import Decision, Judge
from .session import Session
from .stats import Stats


class Sequence:
    """A sequence's caches, its place in the text, its drafter context and its judge.

    Args:
        session (Session): The target's caches, and what a conversation keeps beside them.
        judge (Judge): Decides which drafts stay.
        context: The drafter's context.
        verify_width (int): The most rows of a block that the target verifies; 1 does not draft.

    Attributes:
        position (int): Tokens that the caches cover.
        anchor (int, optional): The last token handed out, which the caches do not cover yet.
        history (mx.array, optional): All tokens up to the anchor, where there are processors.
        context_start (int): Position of the first row that a later block can see.
        answering (bool): Whether the prompt has been processed.
        adaptive (bool): Whether a controller may choose fewer rows. The draws of a seed must not
            depend on what others do, or on how long rounds take.
        stats (Stats): The rounds of this sequence alone.
    """

    def __init__(self, session: Session, judge: Judge, context: Any, verify_width: int):
        self.session, self.judge, self.context = session, judge, context
        self.verify_width, self.stats = verify_width, Stats()
        self.adaptive = judge.is_repeatable_at_any_width
        # Without drafts of its own the drafter's context is not kept up either.
        self.drafts = True
        self.position = len(session)
        self.anchor: int | None = None
        self.history: mx.array | None = None
        self.context_start = 0
        self.answering = False

    @property
    def caches(self) -> list[Any]:
        """The target's caches, one a layer."""
        return self.session.working

    @property
    def copies(self) -> CopyContext | None:
        """Return where its drafts may be copied from."""
        return self.context if isinstance(self.context, CopyContext) else None

    @property
    def drafter_context(self) -> Any:
        """Return the context of the drafter itself."""
        return self.context if self.copies is None else self.copies.inner

    @property
    def keeps_tokens(self) -> bool:
        """Tell whether anybody needs the ids of the prompt on the host."""
        return self.session.keeps_tokens or hasattr(self.context, "read")

    @property
    def context_state(self) -> list[mx.array]:
        """The arrays of the drafter's context; empty where a foreign context does not tell."""
        return getattr(self.context, "state", [])

    def kept(self, decision: Decision) -> list[int]:
        """Return the tokens of a pass's rows that stay, as far as they are known."""
        anchor = [] if self.anchor is None else [self.anchor]
        return [*anchor, *decision.tokens[: decision.taken]][: decision.num_kept]

    def history_with(self, tokens: list[int]) -> mx.array | None:
        """All tokens up to the anchor and some more, where there are processors."""
        if self.history is None:
            return None
        return mx.concatenate([self.history, mx.array(tokens, mx.uint32)])

    def advance(self, decision: Decision) -> list[int]:
        """Account for a pass of which ``decision.num_kept`` rows stay; return their tokens."""
        rows, emitted = self.kept(decision), decision.tokens[: decision.taken]
        self.position += decision.num_kept
        # Where the last token handed out is a draft, its row is in the caches already.
        self.anchor = emitted[-1] if decision.taken == len(decision.tokens) else None
        self.history = self.history_with(emitted)
        self.judge.accept(emitted)
        self.session.append(rows)
        if not self.answering:
            self.answering = True
            self.session.checkpoint()
        return rows
