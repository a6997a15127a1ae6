"""Find the stage of a drafter that is at fault, on text that its target wrote.

The drafter drafts from the true past at many anchors. Then each repair is tried on the same
anchors. If one makes the true tokens much more likely, the mistake it undoes is the fault.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import mlx.nn as nn
import numpy as np
from mlx_lm.generate import wired_limit

from ..decode.stats import LOW_ACCEPTANCE
from ..drafter.model import Drafter
from ..evaluation.teacher_forced import (
    CANDIDATES,
    DraftQuality,
    TextPass,
    acceptance_length,
    measure_drafts,
    recall,
)
from ..targets import Target, bind
from .options import DEFAULT_ANCHORS
from .repairs import Repair, make_repairs

# A text and an anchor in it.
Piece = tuple[TextPass, int]

# A gain is significant from this many standard errors on, over at least so many anchors.
SIGNIFICANT, FEWEST_ANCHORS = 3.0, 12
# Nats that one token may count for there: a few surprising tokens would outweigh all others.
STEADY = 0.25
# A repair is dropped once its gain is this many standard errors below zero.
HOPELESS = 3.0
FIRST_CHUNK = 4
# Published drafters recall about 0.85 of the first rows of mathematics. Half of that is low.
LOW_RECALL = 0.4


@dataclass
class Outcome:
    """What one repair changed, anchor by anchor.

    Attributes:
        gains: Of the true tokens' log probability, in nats.
        steady: The same with each token's share limited to ``STEADY``.
        hits: Whether the repaired stage was right: the first row's best token, or the selector's
            choices where the true token is a candidate.
    """

    repair: Repair
    gains: np.ndarray = field(default_factory=lambda: np.empty(0))
    steady: np.ndarray = field(default_factory=lambda: np.empty(0))
    hits: np.ndarray = field(default_factory=lambda: np.empty(0, bool))

    def add(self, before: DraftQuality, after: DraftQuality) -> None:
        """Add the measurements of more anchors."""
        hits = after.chosen[after.among] if self.repair.of_selector else after.best[:, 0]
        self.gains = np.concatenate([self.gains, self.repair.gains(before, after)])
        self.steady = np.concatenate([self.steady, self.repair.gains(before, after, STEADY)])
        self.hits = np.concatenate([self.hits, hits])

    @property
    def gain(self) -> float:
        return float(self.gains.mean()) if self.gains.size else 0.0

    @property
    def errors(self) -> float:
        """The mean of the steady gains in standard errors."""
        if not self.steady.any():
            return 0.0
        # Equal gains have a standard error of zero.
        error = max(float(self.steady.std()) / self.steady.size**0.5, 1e-6)
        return float(self.steady.mean()) / error

    @property
    def hopeless(self) -> bool:
        """Significantly worse, or without any effect."""
        no_effect = self.gains.size > 0 and not self.gains.any()
        return no_effect or (self.errors < -HOPELESS and self.gain < 0)

    def is_behind(self, leader: "Outcome") -> bool:
        """Tell whether this is significantly worse than another repair of the same kind."""
        same = self.repair.of_selector == leader.repair.of_selector
        if self is leader or not same or self.gains.size < FEWEST_ANCHORS:
            return False
        behind = leader.gains - self.gains
        return behind.mean() > HOPELESS * behind.std() / behind.size**0.5

    @property
    def significant(self) -> bool:
        """A significant gain *and* a stage that works."""
        # Merely flattening the distribution also raises log probabilities.
        works = self.hits.size > 0 and self.hits.mean() >= LOW_ACCEPTANCE
        enough = self.gains.size >= FEWEST_ANCHORS
        return bool(works and enough and self.errors > SIGNIFICANT and self.gain > 0)


@dataclass
class Trace:
    """The result of :func:`bisect`.

    ``fault`` is the repair that helps most, if one helps significantly, and ``alike`` are others of
    its stage that do. ``window`` is the first row's recall within the drafter's window and past it.
    """

    drafter: Drafter
    quality: DraftQuality
    outcomes: list[Outcome]
    fault: Outcome | None
    window: tuple[float, float] | None
    alike: Sequence[Outcome] = ()

    def lines(self) -> Iterator[str]:
        """Yield one line a fact, the verdict last."""
        quality = self.quality
        yield f"anchors: {len(quality.best)}, teacher forced on the target's own text"
        count = self.drafter.args.selector_top_k or CANDIDATES
        yield f"recall@1 by position: {_rates(recall(quality.best))}"
        yield f"recall@{count} by position: {_rates(recall(quality.among))}"
        if self.drafter.args.has_selector:
            chosen = quality.chosen[quality.among].mean() if quality.among.any() else float("nan")
            yield f"selector, told the true token before: right on {chosen:.2f} of true candidates"
        yield (
            f"acceptance length: best tokens {acceptance_length(quality.best):.2f}, path "
            f"{acceptance_length(quality.path):.2f}, oracle {acceptance_length(quality.among):.2f}"
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
        first = float(self.quality.best[:, 0].mean())
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

    Repairs that make things significantly worse, or help less than another, are dropped early. The
    number of anchors doubles for those that remain.

    Args:
        model (nn.Module): The target.
        drafter (Drafter): The suspect. It is not changed.
        texts (sequence): Prompts and the target's greedy answers, as token ids.
        mask_ids (sequence of int): Ids to try as the mask.
        num_anchors (int): The most anchors of all texts together.
        progress (callable): Called with a description before each step.

    Raises:
        ValueError: if no answer is longer than a block.
    """
    target = bind(model)
    repairs = make_repairs(drafter, mask_ids, target.shape.num_layers)
    pieces = _pieces(target, drafter, repairs, texts, num_anchors)
    live = [Outcome(repair) for repair in repairs]
    outcomes, parts, size = list(live), [], FIRST_CHUNK
    seen: list[Piece] = []
    while len(seen) < len(pieces):
        chunk = _in_order(pieces[len(seen) : len(seen) + size])
        progress(f"{len(chunk)} anchors, {len(live)} repairs in question")
        with wired_limit(model):
            before = _measure(drafter, chunk)
            parts.append(before)
            for outcome in live:
                outcome.add(before, _measure(outcome.repair.drafter, chunk))
        live = [outcome for outcome in live if not outcome.hopeless]
        leader = _best(live)
        live = [outcome for outcome in live if leader and not outcome.is_behind(leader)]
        seen, size = seen + chunk, 2 * size
        # Two masks of like meaning are told apart by more anchors alone.
        if len(live) == 1 and live[0].significant:
            break
    helpful = [outcome for outcome in live if outcome.significant]
    fault = _best(helpful)
    stage = fault.repair.stage if fault else None
    alike = [o for o in helpful if o is not fault and o.repair.stage == stage]
    quality = DraftQuality.joined(parts)
    return Trace(drafter, quality, outcomes, fault, _window(drafter, seen, quality), alike)


def _best(outcomes: Sequence[Outcome]) -> Outcome | None:
    return max(outcomes, key=lambda outcome: outcome.gain, default=None)


def _pieces(
    target: Target,
    drafter: Drafter,
    repairs: Sequence[Repair],
    texts: Sequence[tuple[Sequence[int], Sequence[int]]],
    num_anchors: int = DEFAULT_ANCHORS,
) -> list[Piece]:
    """Choose anchors of all texts, in an order whose first few are of different texts."""
    layers = {i for d in [drafter, *(t.drafter for t in repairs)] for i in d.target_layer_ids}
    length = drafter.block_size - 1
    pieces: list[Piece] = []
    for prompt, answer in texts:
        if len(answer) > length:
            text = TextPass(target, [*prompt, *answer], len(prompt), layers)
            pieces += [(text, anchor) for anchor in text.anchors(length)]
    if not pieces:
        raise ValueError(f"A trace needs answers of more than {length} tokens.")
    count = min(num_anchors, len(pieces))
    chosen = [pieces[i * len(pieces) // count] for i in range(count)]
    # A stride that is coprime to the count spreads each chunk over all texts.
    stride = next(s for s in (7, 11, 13, 17, 1) if np.gcd(s, count) == 1)
    return [chosen[i * stride % count] for i in range(count)]


def _in_order(pieces: Sequence[Piece]) -> list[Piece]:
    """Sort by text and position: a text's context only grows."""
    return sorted(pieces, key=lambda piece: (id(piece[0]), piece[1]))


def _measure(drafter: Drafter, pieces: Sequence[Piece]) -> DraftQuality:
    groups = groupby(pieces, key=lambda piece: piece[0])
    return DraftQuality.joined(
        [measure_drafts(drafter, text, [anchor for _, anchor in group]) for text, group in groups]
    )


def _window(
    drafter: Drafter, pieces: Sequence[Piece], quality: DraftQuality
) -> tuple[float, float] | None:
    """Measure the first row's recall at anchors within the drafter's window and past it."""
    size = drafter.context_size
    if size is None:
        return None
    past = np.array([anchor > size for _, anchor in pieces])
    hits = quality.best[:, 0]
    if not past.any() or past.all():
        return None
    return float(hits[~past].mean()), float(hits[past].mean())
