"""Which stage of a drafter is at fault: a bisection on text that its target wrote.

The drafter drafts from the true past at many anchors. Then each repair in turn is tried on the
same anchors: if one makes the true tokens much more likely, what it undoes is the fault.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import mlx.nn as nn
import numpy as np

from ..decode.stats import LOW_ACCEPTANCE
from ..drafter.model import Drafter
from ..evaluation.teacher_forced import (
    CANDIDATES,
    Forced,
    Replay,
    acceptance_length,
    measure,
    recall,
)
from ..targets import Target, bind
from .repairs import Repair, make_repairs

DEFAULT_ANCHORS = 120
# A gain counts from this many standard errors on, over at least so many anchors.
CERTAIN, FEWEST_ANCHORS = 3.0, 12
# Nats that one token may gain or lose in that: a few surprising tokens would outweigh all others.
STEADY = 0.25
# A repair is given up once it is this many standard errors below no gain at all.
HOPELESS = 3.0
FIRST_CHUNK = 4
# Published drafters recall about 0.85 of the first rows of mathematics; half of that is low.
LOW_RECALL = 0.4


@dataclass
class Outcome:
    """What one repair did, anchor by anchor.

    ``gains`` are of the true tokens' log probability, ``steady`` the same with no token counting
    much more than others; ``hits`` say whether the repaired stage was right: the first row's best
    token, or the selector's choices among candidates with a true one.
    """

    repair: Repair
    gains: np.ndarray = field(default_factory=lambda: np.empty(0))
    steady: np.ndarray = field(default_factory=lambda: np.empty(0))
    hits: np.ndarray = field(default_factory=lambda: np.empty(0, bool))

    def add(self, before: Forced, after: Forced):
        """Take in the measurements of some more anchors."""
        hits = after.chosen[after.among] if self.repair.of_selector else after.best[:, 0]
        self.gains = np.concatenate([self.gains, self.repair.gains(before, after)])
        self.steady = np.concatenate([self.steady, self.repair.gains(before, after, STEADY)])
        self.hits = np.concatenate([self.hits, hits])

    @property
    def gain(self) -> float:
        return float(self.gains.mean()) if self.gains.size else 0.0

    @property
    def errors(self) -> float:
        """How many standard errors the steady gains are above nothing."""
        if not self.steady.any():
            return 0.0
        # Equal gains would claim no error at all.
        error = max(float(self.steady.std()) / self.steady.size**0.5, 1e-6)
        return float(self.steady.mean()) / error

    @property
    def hopeless(self) -> bool:
        """Clearly worse, or without any effect."""
        without_effect = self.gains.size > 0 and not self.gains.any()
        return without_effect or (self.errors < -HOPELESS and self.gain < 0)

    def is_behind(self, leader: "Outcome") -> bool:
        """Clearly worse than another repair of the same kind, anchor by anchor."""
        same = self.repair.of_selector == leader.repair.of_selector
        if self is leader or not same or self.gains.size < FEWEST_ANCHORS:
            return False
        behind = leader.gains - self.gains
        return behind.mean() > HOPELESS * behind.std() / behind.size**0.5

    @property
    def certain(self) -> bool:
        """Clearly better, and then a stage that works: a guess less sure of itself gains too."""
        works = self.hits.size > 0 and self.hits.mean() >= LOW_ACCEPTANCE
        return (
            works and self.gains.size >= FEWEST_ANCHORS and self.errors > CERTAIN and self.gain > 0
        )


@dataclass
class Trace:
    """What a bisection found.

    ``fault`` is the repair that helps most, if one certainly does; ``alike`` are those of the same
    stage that the anchors do not tell from it.
    """

    drafter: Drafter
    forced: Forced
    outcomes: list[Outcome]
    fault: Outcome | None
    window: tuple[float, float] | None
    alike: Sequence[Outcome] = ()

    def lines(self) -> Iterator[str]:
        """One line a fact, the verdict last."""
        forced = self.forced
        yield f"anchors: {len(forced.best)}, teacher forced on the target's own text"
        count = self.drafter.args.selector_top_k or CANDIDATES
        yield f"recall@1 by position: {_rates(recall(forced.best))}"
        yield f"recall@{count} by position: {_rates(recall(forced.among))}"
        if self.drafter.args.has_selector:
            chosen = forced.chosen[forced.among].mean() if forced.among.any() else float("nan")
            yield f"selector, told the true token before: right on {chosen:.2f} of true candidates"
        yield (
            f"acceptance length: best tokens {acceptance_length(forced.best):.2f}, path "
            f"{acceptance_length(forced.path):.2f}, oracle {acceptance_length(forced.among):.2f}"
        )
        yield self._window()
        for outcome in sorted(self.outcomes, key=lambda o: -o.gain)[:5]:
            yield (
                f"tried {outcome.repair.change}: {outcome.gain:+.3f} nats a token, "
                f"{outcome.errors:+.1f} standard errors, {outcome.gains.size} anchors"
            )
        yield self.verdict

    def _window(self) -> str:
        size = self.drafter.context_size
        if size is None:
            return "window: none, a layer sees the whole past"
        if self.window is None:
            return f"window: not tested, all anchors are on one side of {size} tokens"
        inside, past = self.window
        return f"window: recall@1 of the first row is {inside:.2f} within it, {past:.2f} past it"

    @property
    def verdict(self) -> str:
        """One line: the stage at fault, or where to look."""
        if self.fault is not None:
            changes = [outcome.repair.change for outcome in (self.fault, *self.alike)]
            return (
                f"verdict: {self.fault.repair.stage} is at fault: with {', or '.join(changes)}, "
                f"the true tokens gain {self.fault.gain:.2f} nats"
            )
        if self.window is not None and self.window[1] < self.window[0] / 2:
            return "verdict: sliding_window is at fault: drafts are good within it, not past it"
        first = recall(self.forced.best)[0]
        if first < LOW_RECALL:
            return (
                f"verdict: no known mistake explains a recall@1 of {first:.2f} in the first row; "
                "the likely causes are, in this order, a drafter of another target or fine-tune, "
                "text unlike its training (chat template, thinking), damaged weights"
            )
        return "verdict: no stage is at fault"


def _rates(rates: Sequence[float | None]) -> str:
    return " ".join("–" if rate is None else f"{rate:.2f}" for rate in rates)


def bisect(
    model: nn.Module,
    drafter: Drafter,
    texts: Sequence[tuple[Sequence[int], Sequence[int]]],
    mask_ids: Sequence[int] = (),
    num_anchors: int = DEFAULT_ANCHORS,
    progress: Callable[[str], None] = lambda _: None,
) -> Trace:
    """Find the stage that is at fault.

    Repairs that make things clearly worse, or help clearly less than another, are given up early,
    so that the anchors' number doubles only for those that are still in question.

    Args:
        model (nn.Module): The target.
        drafter (Drafter): The suspect; it is not changed.
        texts (sequence): Prompt and greedy answer of the target, as token ids.
        mask_ids (sequence of int): Ids that may be the true mask.
        num_anchors (int): The most anchors of all texts together.
        progress (callable): Called with a description before each step.

    Raises:
        ValueError: if no answer is longer than a block.
    """
    target = bind(model)
    repairs = make_repairs(drafter, mask_ids, target.shape.num_layers)
    pieces = _pieces(target, drafter, repairs, texts, num_anchors)
    live = [Outcome(repair) for repair in repairs]
    outcomes, parts, seen, size = list(live), [], [], FIRST_CHUNK
    while len(seen) < len(pieces):
        chunk = _in_order(pieces[len(seen) : len(seen) + size])
        progress(f"{len(chunk)} anchors, {len(live)} repairs in question")
        before = _measure(drafter, chunk)
        parts.append(before)
        for outcome in live:
            outcome.add(before, _measure(outcome.repair.drafter, chunk))
        live = [outcome for outcome in live if not outcome.hopeless]
        leader = max(live, key=lambda outcome: outcome.gain, default=None)
        live = [outcome for outcome in live if not outcome.is_behind(leader)]
        seen, size = seen + chunk, 2 * size
        # Of two masks of like meaning only more anchors tell which one it was.
        if len(live) == 1 and leader.certain:
            break
    certain = [outcome for outcome in live if outcome.certain]
    fault = max(certain, key=lambda outcome: outcome.gain, default=None)
    alike = [o for o in certain if o is not fault and o.repair.stage == fault.repair.stage]
    forced = Forced.joined(parts)
    return Trace(drafter, forced, outcomes, fault, _window(drafter, seen, forced), alike)


Piece = tuple[Replay, int]


def _pieces(
    target: Target,
    drafter: Drafter,
    repairs: Sequence[Repair],
    texts: Sequence[tuple[Sequence[int], Sequence[int]]],
    num_anchors: int,
) -> list[Piece]:
    """Anchors of all texts, in an order that soon has some of each."""
    layers = {i for d in [drafter, *(t.drafter for t in repairs)] for i in d.target_layer_ids}
    length, pieces = drafter.block_size - 1, []
    for prompt, answer in texts:
        if len(answer) > length:
            replay = Replay(target, [*prompt, *answer], len(prompt), layers)
            pieces += [(replay, anchor) for anchor in replay.anchors(length)]
    if not pieces:
        raise ValueError(f"A trace needs answers of more than {length} tokens.")
    count = min(num_anchors, len(pieces))
    chosen = [pieces[i * len(pieces) // count] for i in range(count)]
    # A stride that is prime to most counts spreads each chunk over all texts.
    stride = next(s for s in (7, 11, 13, 17, 1) if np.gcd(s, count) == 1)
    return [chosen[i * stride % count] for i in range(count)]


def _in_order(pieces: Sequence[Piece]) -> list[Piece]:
    """Text by text and forwards, so that a text's context only grows."""
    return sorted(pieces, key=lambda piece: (id(piece[0]), piece[1]))


def _measure(drafter: Drafter, pieces: Sequence[Piece]) -> Forced:
    groups = groupby(pieces, key=lambda piece: piece[0])
    return Forced.joined(
        [measure(drafter, replay, [anchor for _, anchor in group]) for replay, group in groups]
    )


def _window(
    drafter: Drafter, pieces: Sequence[Piece], forced: Forced
) -> tuple[float, float] | None:
    """Recall of the first row at anchors within the drafter's window, and at those past it."""
    size = drafter.context_size
    if size is None:
        return None
    past = np.array([anchor > size for _, anchor in pieces])
    hits = forced.best[:, 0]
    if not past.any() or past.all():
        return None
    return float(hits[~past].mean()), float(hits[past].mean())
