"""A drafter measured on a given text: at every anchor it drafts from the true past."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import generate_step

from ..drafter.context import Context
from ..drafter.logits import best_tokens, transform
from ..drafter.model import Drafter
from ..drafter.selector import CandidateSelector
from ..kernels import path_walk
from ..targets import Target

# Where a drafter has no selector, recall is counted among as many candidates as published ones.
CANDIDATES = 16
# Finite, so that the difference of two is 0 and not NaN.
_NEVER = -1e4


class TextPass:
    """One pass of the target over a known text.

    Args:
        target (Target): The target.
        tokens (sequence of int): Prompt and answer.
        start (int): Tokens of the prompt.
        layers (iterable of int): Layers whose outputs to keep.
    """

    def __init__(
        self, target: Target, tokens: Sequence[int], start: int, layers: Iterable[int]
    ) -> None:
        self.target, self.start = target, start
        self.tokens = mx.array(list(tokens), mx.uint32)
        layers = sorted(set(layers))
        taps = target.forward(self.tokens[None], target.make_cache(), layers).taps
        mx.eval(taps)
        parts = () if taps is None else mx.split(taps, len(layers), axis=-1)
        self._outputs = dict(zip(layers, parts, strict=True))

    def taps(self, layers: Sequence[int]) -> mx.array:
        """Return the outputs of some of the kept layers, [1, S, T * H]."""
        return mx.concatenate([self._outputs[layer] for layer in layers], axis=-1)

    def anchors(self, length: int, stride: int = 1) -> range:
        """Return the positions in the answer that have ``length`` tokens after them."""
        return range(self.start, self.tokens.size - length, stride)


@dataclass
class DraftQuality:
    """How good drafts are: arrays [anchors, L - 1], a column for each position of a block.

    Attributes:
        logprob: The drafter's log probability of the true token, over the vocabulary.
        best: Whether the drafter's best token is the true one.
        among: Whether the true token is among the candidates.
        chosen: Whether the selector, told the true token before, chooses the true one.
        selector_logprob: Its log probability of the true token; NaN where that is not a candidate.
        path: Whether the token of the drafted path is the true one.
    """

    logprob: np.ndarray
    best: np.ndarray
    among: np.ndarray
    chosen: np.ndarray
    selector_logprob: np.ndarray
    path: np.ndarray

    @classmethod
    def joined(cls, parts: Sequence["DraftQuality"]) -> "DraftQuality":
        """Join the anchors of several texts."""
        names = [field.name for field in fields(cls)]
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def measure_drafts(drafter: Drafter, text: TextPass, anchors: Sequence[int]) -> DraftQuality:
    """Draft at every anchor of a text from the true tokens before it.

    Args:
        drafter (Drafter): Whose taps the pass has kept.
        text (TextPass): The text.
        anchors (sequence of int): Increasing positions, each with a block of tokens after it.
    """
    context, done = drafter.make_context(), 0
    size = drafter.context_size
    taps = text.taps(drafter.target_layer_ids)
    blocks = []
    for anchor in anchors:
        first = done if size is None else max(done, anchor - size)
        if first < anchor:
            drafter.extend(context, text.tokens[first:anchor], taps[:, first:anchor], first)
        done = anchor
        blocks.append(_at_anchor(drafter, text, context, anchor))
        mx.eval(blocks[-1], context.state)
    columns = zip(*blocks, strict=True)
    return DraftQuality(*(np.array(mx.stack(list(column))) for column in columns))


def _at_anchor(
    drafter: Drafter, text: TextPass, context: Context, anchor: int
) -> tuple[mx.array, ...]:
    """Compute the fields of :class:`DraftQuality` for one block, [L - 1] each."""
    args, length = drafter.args, drafter.block_size - 1
    token = text.tokens[anchor : anchor + 1]
    truth = text.tokens[anchor + 1 : anchor + 1 + length]
    hidden, logits = drafter.run_block(text.target, token, context, drafter.block_size)
    unary, candidates = best_tokens(logits, args.selector_top_k or CANDIDATES, args)
    path, told = candidates[0, :, 0], unary[0]
    if args.has_selector:
        path, told = _select(drafter.candidate_selector, token, truth, hidden, candidates, unary)
    is_truth = candidates[0] == truth[:, None]
    among = mx.any(is_truth, axis=-1)
    chosen = mx.take_along_axis(is_truth, mx.argmax(told, axis=-1, keepdims=True), axis=-1)[:, 0]
    selected = mx.where(is_truth, nn.log_softmax(told), 0.0).sum(axis=-1)
    return (
        _logprob_of(truth, transform(logits[0], args)),
        is_truth[:, 0],
        among,
        chosen,
        mx.where(among, selected, mx.nan),
        path == truth,
    )


def _logprob_of(truth: mx.array, logits: mx.array) -> mx.array:
    """Log probability of the true tokens; ids that cannot be drafted have no column."""
    inside = truth < logits.shape[-1]
    columns = mx.where(inside, truth, 0)[:, None]
    logprobs = mx.take_along_axis(nn.log_softmax(logits), columns, axis=-1)[:, 0]
    return mx.where(inside, logprobs, _NEVER)


def _select(
    selector: CandidateSelector,
    token: mx.array,
    truth: mx.array,
    hidden: mx.array,
    candidates: mx.array,
    unary: mx.array,
) -> tuple[mx.array, mx.array]:
    """Return the drafted path [L - 1], and the candidates' scores [L - 1, K] after the truth."""
    # With the true token as the first candidate, all pairs hold what comes after it, too.
    ids = mx.concatenate([truth[None, :, None], candidates], axis=-1)
    padded = mx.pad(unary, [(0, 0), (0, 0), (1, 0)])
    scores = selector.pair_scores(token, hidden, ids, padded)[..., 1:]
    path = path_walk(scores[:, :, 1:], candidates).tokens
    return path[0], scores[0, :, 0]


def recall(hits: np.ndarray) -> list[float | None]:
    """Compute by position how often a draft is right where all drafts before it are.

    ``None`` where no anchor gets that far.
    """
    alive = np.ones(len(hits), bool)
    rates: list[float | None] = []
    for column in hits.T:
        rates.append(float(column[alive].mean()) if alive.any() else None)
        alive &= column
    return rates


def acceptance_length(hits: np.ndarray) -> float:
    """Compute the tokens a round, bonus included, if leading right drafts are accepted."""
    return 1 + float(np.cumprod(hits, axis=1).sum(axis=1).mean())


def write_text(model: nn.Module, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Write a greedy answer with plain mlx-lm; end-of-text tokens do not stop it."""
    steps = generate_step(mx.array(list(prompt)), model, max_tokens=max_tokens)
    return [int(token) for token, _ in steps]
