"""One number to lower: the loss of a batch of blocks, and what a person wants to know of it."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx

from ..drafter.model import Drafter
from .blocks import run_blocks
from .codebooks import FactoredCodebook
from .losses import d_pace_weights, position_weights, selector_loss, unary_loss, weighted_mean
from .vocabulary import MAX_LOGITS, FullVocabulary, SampledVocabulary


class Batch(NamedTuple):
    """N texts with A anchors each.

    ``tokens`` [N, S] ids; ``taps`` [N, S, T * H]; ``final`` [N, S, H] what the target's head
    reads, or ``None``; ``lengths`` [N]; ``anchors`` [N, A] positions; ``used`` [N, A] booleans,
    false for an anchor that only fills a row up.
    """

    tokens: mx.array
    taps: mx.array
    final: mx.array | None
    lengths: mx.array
    anchors: mx.array
    used: mx.array


@dataclass(frozen=True)
class Objective:
    """What is asked of a drafter.

    Attributes:
        loss: One of ``LOSSES``.
        gamma: Decay of the rows' weights; ``None`` weighs them by D-PACE instead.
        selector_weight: Of the selector's loss beside the unary one.
        detach_selector: Whether the selector's loss leaves the rest of the drafter alone.
        checkpoint: Whether what a text's blocks computed on the way is computed again for the
            gradient, one text at a time, and not kept.
        block_size: Rows L of the blocks; ``None`` for as many as the drafter's have.
    """

    loss: str = "ce"
    gamma: float | None = 4.0
    selector_weight: float = 1.0
    detach_selector: bool = False
    checkpoint: bool = False
    block_size: int | None = None

    def __call__(
        self,
        drafter: Drafter,
        target: Any,
        vocabulary: FullVocabulary | SampledVocabulary,
        batch: Batch,
    ) -> tuple[mx.array, dict[str, mx.array]]:
        """The loss and, by position, sums over the batch's rows.

        Returns:
            tuple: The loss, and arrays [L - 1]: ``rows`` that count, of them ``best`` (the best
            token is right), ``among`` (the true token is a candidate) and ``chosen`` (the
            selector takes it), and ``best_prefix`` and ``chosen_prefix``, rows up to which
            everything is right.
        """
        hidden = self._hidden(drafter, target, batch)
        rows = _label_rows(batch, (self.block_size or drafter.block_size) - 1, vocabulary)
        shape = rows.labels.shape
        costs = self._in_turns(drafter, vocabulary, hidden, rows)
        costs = [None if cost is None else cost.reshape(shape) for cost in costs]
        loss = self._total(Costs(*costs), rows.valid)
        return loss, _counts(Costs(*costs), rows.valid)

    def _hidden(self, drafter: Drafter, target: Any, batch: Batch) -> mx.array:
        if not self.checkpoint:
            arrays = batch.tokens, batch.taps, batch.anchors
            return run_blocks(drafter, target, *arrays, self.block_size)

        def inner(parameters: dict[str, Any], *text: mx.array) -> mx.array:
            drafter.update(parameters)
            # A checkpoint asks for the gradient of all that it is given, and ids have none.
            arrays = map(mx.stop_gradient, text)
            return run_blocks(drafter, target, *arrays, self.block_size)

        run_text, weights = mx.checkpoint(inner), drafter.trainable_parameters()
        arrays = batch.tokens, batch.taps, batch.anchors
        texts = zip(*(mx.split(x, len(x)) for x in arrays), strict=True)
        return mx.concatenate([run_text(weights, *text) for text in texts])

    def _in_turns(
        self,
        drafter: Drafter,
        vocabulary: FullVocabulary | SampledVocabulary,
        hidden: mx.array,
        rows: "Rows",
    ) -> "Costs":
        """All rows' costs, a bounded number of logits at a time."""
        H = hidden.shape[-1]
        flat = [hidden.reshape(-1, H), rows.labels.flatten(), rows.before.flatten()]
        flat.append(None if rows.final is None else rows.final.reshape(-1, rows.final.shape[-1]))
        step = max(1, MAX_LOGITS // vocabulary.size)
        if len(flat[0]) <= step:
            return self._costs(drafter, vocabulary, *flat)

        def inner(parameters: dict[str, Any], hidden: mx.array, *some: mx.array | None) -> "Costs":
            drafter.update(parameters)
            some = (None if x is None else mx.stop_gradient(x) for x in some)
            return self._costs(drafter, vocabulary, hidden, *some)

        # What one turn computed on the way is computed again for the gradient, and not kept.
        turn, parts = mx.checkpoint(inner), []
        for start in range(0, len(flat[0]), step):
            some = [None if x is None else x[start : start + step] for x in flat]
            parts.append(turn(drafter.trainable_parameters(), *some))
        columns = zip(*parts, strict=True)
        return Costs(*(None if c[0] is None else mx.concatenate(c) for c in columns))

    def _costs(
        self,
        drafter: Drafter,
        vocabulary: FullVocabulary | SampledVocabulary,
        hidden: mx.array,
        labels: mx.array,
        before: mx.array,
        final: mx.array | None,
    ) -> "Costs":
        """The costs of rows [M], from what the drafter computed there."""
        scores = vocabulary.scores(hidden, labels, final)
        unary, hard = unary_loss(self.loss, scores.draft, scores.target, scores.label)
        # What is only counted: a checkpoint would ask for the gradient of the ids that it reads by.
        best = scores.ids[mx.argmax(mx.stop_gradient(scores.unary), axis=-1)] == labels
        if not drafter.args.has_selector:
            return Costs(unary, hard, best)
        K, selector = drafter.args.selector_top_k, drafter.candidate_selector
        columns = mx.argpartition(mx.stop_gradient(-scores.unary), K - 1, axis=-1)[:, :K]
        is_label = scores.ids[columns] == labels[:, None]
        among = mx.any(is_label, axis=-1)
        unaries = mx.take_along_axis(scores.unary, columns, axis=-1)
        if self.detach_selector:
            hidden, unaries = mx.stop_gradient(hidden), mx.stop_gradient(unaries)
        choice = unaries + pair_scores(selector, hidden, before, scores.ids, columns)
        wanted = None
        if scores.target is not None:
            wanted = mx.exp(mx.take_along_axis(scores.target, columns, axis=-1))
        cost, logprob = selector_loss(choice, is_label, wanted)
        picked = mx.argmax(mx.stop_gradient(choice), axis=-1, keepdims=True)
        chosen = mx.take_along_axis(is_label, picked, axis=-1)[:, 0]
        return Costs(unary, hard, best, among, cost, logprob, chosen)

    def _total(self, costs: "Costs", valid: mx.array) -> mx.array:
        weights = self._weights(mx.exp(-costs.hard), valid)
        if self.gamma is None:
            # D-PACE's weights sum to what a block is expected to give, which is to grow.
            blocks = mx.maximum(valid.any(axis=-1).sum(), 1)
            loss = (costs.unary * weights).sum() / blocks
        else:
            loss = weighted_mean(costs.unary, weights)
        if costs.choice is None or self.selector_weight == 0:
            return loss
        right = mx.where(costs.among, mx.exp(costs.logprob), 0.0)
        # A row without its true token among the candidates has nothing to choose, yet ends a path.
        weights = self._weights(right, valid) * costs.among
        if self.gamma is None:
            return loss + self.selector_weight * (costs.choice * weights).sum() / blocks
        return loss + self.selector_weight * weighted_mean(costs.choice, weights)

    def _weights(self, right: mx.array, valid: mx.array) -> mx.array:
        if self.gamma is None:
            return d_pace_weights(mx.stop_gradient(right), valid)
        return position_weights(valid.shape[-1], self.gamma) * valid


class Rows(NamedTuple):
    """For rows [N, A, L - 1]: true token, the one before it, whether it counts, target's row."""

    labels: mx.array
    before: mx.array
    valid: mx.array
    final: mx.array | None


class Costs(NamedTuple):
    """For each row: unary cost, cross entropy with the true token, what was right.

    Those of the selector, from ``among`` on, are ``None`` without one.
    """

    unary: mx.array
    hard: mx.array
    best: mx.array
    among: mx.array | None = None
    choice: mx.array | None = None
    logprob: mx.array | None = None
    chosen: mx.array | None = None


def pair_scores(
    selector: Any, hidden: mx.array, before: mx.array, ids: mx.array, columns: mx.array
) -> mx.array:
    """<A(before) * H(hidden), B(candidate)> for each candidate, float32.

    Shapes:
      - hidden: [M, H]; before: [M] ids; columns: [M, K] places of the candidates in ids [C]
    Returns:
      - [M, K]
    """
    gate = selector.hidden_projection(hidden) * selector.predecessor_codebook(before)
    codebook = selector.successor_codebook
    if isinstance(codebook, FactoredCodebook) and ids.size < columns.size:
        # Each row is a product: fewer are made where candidates repeat.
        after = codebook(ids)[columns]
    else:
        after = codebook(ids[columns])
    return (after.astype(mx.float32) @ gate.astype(mx.float32)[..., None])[..., 0]


def _label_rows(batch: Batch, length: int, vocabulary: FullVocabulary | SampledVocabulary) -> Rows:
    """What the rows of every anchor's block are to draft."""
    at = batch.anchors[..., None] + mx.arange(1, length + 1)
    valid = (at < batch.lengths[:, None, None]) & batch.used[..., None]
    N, A, _ = at.shape
    at = mx.minimum(at, batch.tokens.shape[1] - 1).reshape(N, -1)
    labels = mx.take_along_axis(batch.tokens, at, axis=1).reshape(N, A, length)
    before = mx.take_along_axis(batch.tokens, at - 1, axis=1).reshape(N, A, length)
    # A padding id of the target has no row in the codebooks.
    before = mx.minimum(before, vocabulary.args.vocab_size - 1)
    limit = vocabulary.vocab_size
    valid = valid & (labels < limit)
    final = None
    if batch.final is not None:
        final = mx.take_along_axis(batch.final, (at - 1)[..., None], axis=1)
        final = final.reshape(N, A, length, -1)
    return Rows(mx.minimum(labels, limit - 1), before, valid, final)


def _counts(costs: Costs, valid: mx.array) -> dict[str, mx.array]:
    counts = {"rows": valid, "best": costs.best & valid}
    counts["best_prefix"] = mx.cumprod(counts["best"].astype(mx.int32), axis=-1)
    if costs.chosen is not None:
        counts |= {"among": costs.among & valid, "chosen": costs.chosen & valid}
        counts["chosen_prefix"] = mx.cumprod(counts["chosen"].astype(mx.int32), axis=-1)
    return {name: value.astype(mx.int32).sum(axis=(0, 1)) for name, value in counts.items()}
