"""A drafter measured on a given text: at every anchor it drafts from the true past."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import generate_step

from ..drafter.model import Drafter
from ..kernels import top_k
from ..targets import Target

# Where a drafter has no selector, recall is counted among as many candidates as published ones.
CANDIDATES = 16
# Finite, so that two of them differ by nothing.
_NEVER = -1e4


class Replay:
    """A text that has run through the target once.

    Args:
        target (Target): The target.
        tokens (sequence of int): Prompt and answer.
        start (int): Tokens of the prompt.
        layers (iterable of int): Layers whose outputs to keep.
    """

    def __init__(self, target: Target, tokens: Sequence[int], start: int, layers: Iterable[int]):
        self.target, self.start = target, start
        self.tokens = mx.array(tokens, mx.uint32)
        layers = sorted(set(layers))
        taps = target.forward(self.tokens[None], target.make_cache(), layers).taps
        self.rows = dict(zip(layers, mx.split(taps, len(layers), axis=-1), strict=True))
        mx.eval(taps)

    def taps(self, layers: Sequence[int]) -> mx.array:
        """Outputs of some of the kept layers, [1, S, T * H]."""
        return mx.concatenate([self.rows[layer] for layer in layers], axis=-1)

    def anchors(self, length: int, stride: int = 1) -> range:
        """Positions in the answer that have ``length`` tokens after them."""
        return range(self.start, self.tokens.size - length, stride)


@dataclass
class Forced:
    """One row for each anchor, one column for each draft position; the path is whole or not.

    Attributes:
        logprob: The drafter's log probability of the true token, over the vocabulary.
        best: Whether the drafter's best token is the true one.
        among: Whether the true token is among the candidates.
        chosen: Whether the selector, told the true token before, chooses the true one.
        selector_logprob: Its log probability of the true token; NaN where that is no candidate.
        path: Whether the token of the drafted path is the true one.
    """

    logprob: np.ndarray
    best: np.ndarray
    among: np.ndarray
    chosen: np.ndarray
    selector_logprob: np.ndarray
    path: np.ndarray

    @classmethod
    def joined(cls, parts: Sequence["Forced"]) -> "Forced":
        """The anchors of several texts."""
        names = [field.name for field in fields(cls)]
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def measure(drafter: Drafter, replay: Replay, anchors: Sequence[int]) -> Forced:
    """Draft at every anchor of a text from the true tokens before it.

    Args:
        drafter (Drafter): Whose taps the replay has kept.
        replay (Replay): The text.
        anchors (sequence of int): Increasing positions, each with a block of tokens after it.
    """
    context, done = drafter.make_context(), 0
    size = drafter.context_size
    taps = replay.taps(drafter.target_layer_ids)
    rows = []
    for anchor in anchors:
        first = done if size is None else max(done, anchor - size)
        if first < anchor:
            drafter.extend(context, replay.tokens[first:anchor], taps[:, first:anchor], first)
        done = anchor
        rows.append(_at_anchor(drafter, replay, context, anchor))
        mx.eval(rows[-1], context.state)
    columns = zip(*rows, strict=True)
    return Forced(*(np.array(mx.stack(column)) for column in columns))


def _at_anchor(drafter: Drafter, replay: Replay, context, anchor: int) -> tuple[mx.array, ...]:
    args, length = drafter.args, drafter.block_size - 1
    token = replay.tokens[anchor : anchor + 1]
    truth = replay.tokens[anchor + 1 : anchor + 1 + length]
    hidden, logits = drafter.run_block(replay.target, token, context, drafter.block_size)
    path = drafter.choose(token, hidden, logits)[0].tokens
    transform = args.output_multiplier, args.final_logit_softcapping
    unary, ids = top_k(logits[0], args.selector_top_k or CANDIDATES, *transform)
    is_truth = ids == truth[:, None]
    logprob = _log_softmax(_transformed(logits[0], *transform))
    # Of ids that cannot be drafted, of which a table may have no row.
    inside = truth < logprob.shape[-1]
    logprob = mx.take_along_axis(logprob, mx.where(inside, truth, 0)[:, None], axis=-1)[:, 0]
    logprob = mx.where(inside, logprob, _NEVER)
    if args.has_selector:
        selector = drafter.candidate_selector
        rows = selector.predecessor_codebook.weight.shape[0]
        previous = mx.minimum(mx.concatenate([token, truth[:-1]]), rows - 1)
        before = selector.predecessor_codebook(previous)
        gate = before.astype(mx.float32) * selector.hidden_projection(hidden[0]).astype(mx.float32)
        after = selector.successor_codebook(ids).astype(mx.float32)
        unary = unary + (after @ gate[:, :, None])[..., 0]
    chosen = mx.take_along_axis(is_truth, mx.argmax(unary, axis=-1, keepdims=True), axis=-1)[:, 0]
    selected = mx.where(is_truth, _log_softmax(unary), 0.0).sum(axis=-1)
    among = mx.any(is_truth, axis=-1)
    return (
        logprob,
        is_truth[:, 0],
        among,
        chosen,
        mx.where(among, selected, mx.nan),
        path == truth,
    )


def _transformed(logits: mx.array, multiplier: float, softcap: float | None) -> mx.array:
    logits = logits.astype(mx.float32) * multiplier
    return softcap * mx.tanh(logits / softcap) if softcap else logits


def _log_softmax(x: mx.array) -> mx.array:
    return x - mx.logsumexp(x, axis=-1, keepdims=True)


def recall(hits: np.ndarray) -> list[float | None]:
    """By position: how often a row is right where all rows before it are.

    ``None`` where no anchor gets that far.
    """
    alive = np.ones(len(hits), bool)
    rates = []
    for column in hits.T:
        rates.append(float(column[alive].mean()) if alive.any() else None)
        alive &= column
    return rates


def acceptance_length(hits: np.ndarray) -> float:
    """Tokens a round, bonus included, if the leading right rows were accepted."""
    return 1 + float(np.cumprod(hits, axis=1).sum(axis=1).mean())


def write_text(model: nn.Module, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """A greedy answer of plain mlx-lm, whatever ends it."""
    steps = generate_step(mx.array(prompt), model, max_tokens=max_tokens)
    return [token for token, _ in steps]
