"""Drafts copied from what was said before: edits, quotations and code repeat their prompt."""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import mlx.core as mx
from mlx_lm.utils import common_prefix_len

from .drafter.proposal import Proposal, Proposer
from .targets import Target

# Tokens that have to repeat before what followed them is worth a draft.
MIN_MATCH = 3
MAX_DRAFTS = 15
# Drafts end where the chance that all of them stay falls below this.
MIN_CHANCE = 0.3
# The index forgets the oldest tokens of twice as many.
MAX_TOKENS = 65_536
# How often the next token is right after matches of 3, 4-7, 8-15, 16-31 and more tokens, before
# the answer itself has told; how many tokens that counts for, and how many are remembered.
PRIOR = (0.6, 0.7, 0.9, 0.95, 0.97)
PRIOR_WEIGHT, MEMORY = 4.0, 32
# Drafts of a drafter's that are expected to stay before its first round, and how many rounds its
# average looks back.
DRAFTER_PRIOR, DRAFTER_MEMORY = 2.0, 16


class CopyIndex:
    """A text and the longest suffix of it that occurs earlier, kept up token by token.

    This is a suffix automaton (Blumer et al. 1985): a state stands for the substrings that end in
    the same places, and its link for the longest of their suffixes that also ends elsewhere. A
    token is added in amortized constant time.

    Args:
        tokens (sequence of int): Where to begin. Default: an empty text.

    Attributes:
        tokens (list of int): The text.
        match (int): Length of the longest suffix that occurs earlier.
        source (int): Where an earlier occurrence of it ends: the index of what followed.
        whole (bool): False if :meth:`append` was interrupted.
    """

    def __init__(self, tokens: Sequence[int] = ()):
        self.tokens: list[int] = []
        self.match = self.source = 0
        self.whole = True
        self._next: list[dict[int, int]] = []
        self._link: list[int] = []
        self._length: list[int] = []
        self._end: list[int] = []
        self._last = self._add_state(0, {}, -1, 0)
        for token in tokens:
            self.append(token)

    def __len__(self) -> int:
        return len(self.tokens)

    def append(self, token: int) -> None:
        """Add a token to the text."""
        self.whole = False
        self.tokens.append(token)
        size, state = len(self.tokens), self._last
        new = self._add_state(size, {}, 0, size)
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        if state >= 0:
            self._link[new] = self._step(state, token)
        self._last, suffix = new, self._link[new]
        self.match, self.source = self._length[suffix], self._end[suffix]
        # Of several occurrences the latest known one is copied from.
        self._end[suffix] = size
        self.whole = True

    def continuation(self, index: int) -> int:
        """Return the token that followed the match, or a later one; a copy may run into itself."""
        return self.tokens[self.source + index % (len(self.tokens) - self.source)]

    def _step(self, state: int, token: int) -> int:
        """Find the state of a state's longest string and a token; split it off longer ones."""
        child = self._next[state][token]
        if self._length[child] == self._length[state] + 1:
            return child
        clone = self._add_state(
            self._length[state] + 1, dict(self._next[child]), self._link[child], self._end[child]
        )
        self._link[child] = clone
        while state >= 0 and self._next[state].get(token) == child:
            self._next[state][token] = clone
            state = self._link[state]
        return clone

    def _add_state(self, length: int, following: dict[int, int], link: int, end: int) -> int:
        self._length.append(length)
        self._next.append(following)
        self._link.append(link)
        self._end.append(end)
        return len(self._length) - 1


class CopyRates:
    """How often the token after a match was the one that followed the match before.

    The longer the match, the surer. Every token of the answer tells, copied or not; old ones
    count less and less.
    """

    def __init__(self) -> None:
        self._right = [PRIOR_WEIGHT * rate for rate in PRIOR]
        self._seen = [PRIOR_WEIGHT] * len(PRIOR)

    def observe(self, match: int, right: bool) -> None:
        """Count the token after a match of so many tokens."""
        place, keep = self._place(match), 1 - 1 / MEMORY
        self._right[place] = keep * self._right[place] + right
        self._seen[place] = keep * self._seen[place] + 1

    def chance(self, match: int) -> float:
        """Return how likely the token after a match of so many tokens is right."""
        place = self._place(match)
        return self._right[place] / self._seen[place]

    def _place(self, match: int) -> int:
        # Lengths from 3, 4, 8, 16 and 32 on.
        return min(match.bit_length() - 2, len(PRIOR) - 1)


class Copy(NamedTuple):
    """What there is to copy in a round.

    ``tokens`` are the drafts and ``chances`` how likely so many of them stay: the first one, the
    first two, and so on.
    """

    tokens: list[int]
    chances: list[float]

    @property
    def expected(self) -> float:
        """Return how many drafts should stay."""
        return sum(self.chances)

    def first(self, count: int) -> "Copy":
        """Keep the first ``count`` drafts."""
        return Copy(self.tokens[:count], self.chances[:count])

    def proposal(self) -> Proposal:
        """Make the drafts what the loop verifies."""
        return Proposal(mx.array(self.tokens, mx.uint32), mx.array(True), copied=True)


class CopyContext:
    """A sequence's committed tokens as an index, and the drafter's context beside it.

    Args:
        drafter (Proposer, optional): Drafts where nothing repeats.

    Attributes:
        index (CopyIndex): The latest tokens, and perhaps the anchor.
        start (int): Absolute position of the index's first token.
        inner: The drafter's context, ``None`` without a drafter.
        rates (CopyRates): How often copies were right.
        drafter_yield (float): Drafts of the drafter's that stay in a round, on average.
    """

    def __init__(self, drafter: Proposer | None = None):
        self.drafter = drafter
        self.inner: Any = None if drafter is None else drafter.make_context()
        self.index, self.start = CopyIndex(), 0
        self.rates = CopyRates()
        self.drafter_yield = DRAFTER_PRIOR
        # Tokens that are committed; the index may hold the anchor, too.
        self.position = 0
        self._drafter_drafted = False

    def read(self, tokens: Sequence[int], position: int) -> None:
        """Take in committed tokens from an absolute position on.

        What was read from there on before is forgotten, unless it was the same.
        """
        self.position = position + len(tokens)
        first = max(position, self.position - MAX_TOKENS)
        if first < self.start < self.position:
            first = self.start
        tokens = tokens[first - position :]
        known = self._go_to(tokens, first)
        for token in tokens[known:]:
            # After an anchor comes the answer.
            self._append(token, learn=known > 0)
        if self._drafter_drafted and known > 0:
            accepted = len(tokens) - known
            self.drafter_yield += (accepted - self.drafter_yield) / DRAFTER_MEMORY
        self._drafter_drafted = False
        if (surplus := len(self.index) - MAX_TOKENS) > MAX_TOKENS:
            latest = CopyIndex(self.index.tokens[surplus:])
            self.index, self.start = latest, self.start + surplus

    def offer(self, anchor: int, most: int) -> Copy:
        """Look up what there is to copy after an anchor.

        Args:
            anchor (int): The last token handed out, which is not committed yet.
            most (int): The most drafts.
        """
        if self.start + len(self.index) == self.position:
            self._append(anchor, learn=True)
        copy, alive = Copy([], []), 1.0
        while self.index.match >= MIN_MATCH and len(copy.tokens) < most:
            alive *= self.rates.chance(self.index.match + len(copy.tokens))
            if alive < MIN_CHANCE:
                break
            copy.tokens.append(self.index.continuation(len(copy.tokens)))
            copy.chances.append(alive)
        return copy

    def leaves_to_drafter(self, copy: Copy, most: int) -> bool:
        """Decide whether the drafter drafts: if more of its drafts should stay, of ``most``.

        The next :meth:`read` tells how many did.
        """
        self._drafter_drafted = copy.expected <= min(most, self.drafter_yield)
        return self._drafter_drafted

    def trim_to(self, position: int) -> None:
        """Forget the rows from an absolute position on."""
        self.read([], position)
        if hasattr(self.inner, "trim_to"):
            self.inner.trim_to(position)
        elif self.drafter is not None:
            self.inner = self.drafter.make_context()

    @property
    def state(self) -> list[mx.array]:
        """Return the arrays of the drafter's context."""
        return getattr(self.inner, "state", [])

    @property
    def layers(self) -> list[Any]:
        """Return the layers of the drafter's context: what is saved of it."""
        return getattr(self.inner, "layers", [])

    @property
    def offset(self) -> int:
        """Return the position after the last row of the drafter's context."""
        return getattr(self.inner, "offset", self.position)

    @offset.setter
    def offset(self, position: int) -> None:
        if self.inner is not None:
            self.inner.offset = position

    def _go_to(self, tokens: Sequence[int], position: int) -> int:
        """Leave in the index what is before a position, and what of ``tokens`` it knows already.

        Returns:
            int: How many of the tokens it knows.
        """
        place = position - self.start
        if not 0 <= place <= len(self.index):
            self.index, self.start = CopyIndex(), position
            return 0
        known = common_prefix_len(self.index.tokens[place:], tokens)
        if place + known < len(self.index) or not self.index.whole:
            self.index = CopyIndex(self.index.tokens[: place + known])
        return known

    def _append(self, token: int, learn: bool) -> None:
        if learn and self.index.match >= MIN_MATCH:
            self.rates.observe(self.index.match, token == self.index.continuation(0))
        self.index.append(token)


class CopyProposer:
    """Copies where the text repeats itself, and leaves other rounds to a drafter.

    It is a :class:`mlx_dflash2.drafter.Proposer` for every target, with or without a drafter.

    Args:
        drafter (Proposer, optional): Default: ``None``, copies only.
        max_drafts (int): The most tokens to copy in a round; the drafter's block does not limit
            them. Default: ``15``.

    Raises:
        ValueError: if ``max_drafts`` is not positive.
    """

    def __init__(self, drafter: Proposer | None = None, max_drafts: int = MAX_DRAFTS):
        if max_drafts < 1:
            raise ValueError(f"`max_drafts` is {max_drafts} but has to be 1 or more.")
        self.drafter, self.max_drafts = drafter, max_drafts

    @property
    def block_size(self) -> int:
        """Return the rows of the drafter's block; 1 without a drafter."""
        return 1 if self.drafter is None else self.drafter.block_size

    @property
    def target_layer_ids(self) -> Sequence[int]:
        """Return the layers that the drafter taps."""
        return () if self.drafter is None else self.drafter.target_layer_ids

    @property
    def context_size(self) -> int | None:
        """Return how many of the latest rows the drafter can use."""
        return 0 if self.drafter is None else self.drafter.context_size

    def make_context(self) -> CopyContext:
        """Make a fresh context for one sequence."""
        return CopyContext(self.drafter)

    def extend(
        self, context: CopyContext, tokens: mx.array, taps: mx.array | None, position: int
    ) -> None:
        """Hand rows to the drafter; the copies' tokens come by :meth:`CopyContext.read`."""
        if self.drafter is not None:
            self.drafter.extend(context.inner, tokens, taps, position)

    def propose(
        self,
        target: Target,
        anchor: mx.array,
        context: CopyContext,
        block_size: int,
        temperature: float = 0.0,
        key: mx.array | None = None,
    ) -> Proposal:
        """Draft the tokens after the anchor; see :class:`mlx_dflash2.drafter.Proposer`."""
        copy = context.offer(cast(int, anchor.item()), self.max_drafts)
        if self.drafter is None or not context.leaves_to_drafter(copy, block_size - 1):
            return copy.proposal()
        return self.drafter.propose(target, anchor, context.inner, block_size, temperature, key)


def without_copies(proposer: Proposer) -> Proposer | None:
    """Return the drafter beside which tokens are copied, or the proposer itself."""
    return proposer.drafter if isinstance(proposer, CopyProposer) else proposer
