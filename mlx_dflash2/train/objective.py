"""The training objective: the loss of a batch of blocks, and counts for the log."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_map

from ..drafter.model import Drafter
from ..drafter.selector import CandidateSelector
from ..kernels.pair_score import score_pairs
from ..targets import TargetHead
from .blocks import run_blocks
from .codebooks import FactoredCodebook
from .losses import d_pace_weights, position_weights, selector_loss, unary_loss, weighted_mean
from .vocabulary import MAX_LOGITS, Vocabulary


class Batch(NamedTuple):
    """N texts with A anchors each.

    Attributes:
        tokens (mx.array): Ids [N, S].
        taps (mx.array): [N, S, T * H].
        final (mx.array, optional): What the target's head reads, [N, S, H].
        lengths (mx.array): Of the texts, [N].
        anchors (mx.array): Positions [N, A].
        used (mx.array): Booleans [N, A]; false for an anchor that is only padding.
    """

    tokens: mx.array
    taps: mx.array
    final: mx.array | None
    lengths: mx.array
    anchors: mx.array
    used: mx.array


# Arrays of rows by name: of what they have to draft, or of what that costs.
Rows = dict[str, mx.array]


@dataclass(frozen=True)
class Objective:
    """What a drafter is trained for.

    Attributes:
        loss: One of ``LOSSES``.
        gamma: Decay of the weights by position; ``None`` weighs rows by D-PACE instead.
        selector_weight: Of the selector's loss beside the unary one.
        detach_selector: Whether the selector's loss leaves the rest of the drafter alone.
        checkpoint: Whether to recompute a text's activations for the gradient, one text at a
            time, instead of keeping them.
        block_size: Rows L of the blocks; ``None`` for as many as the drafter's have.
    """

    loss: str = "ce"
    gamma: float | None = 4.0
    selector_weight: float = 1.0
    detach_selector: bool = False
    checkpoint: bool = False
    block_size: int | None = None

    def __call__(
        self, drafter: Drafter, target: TargetHead, vocabulary: Vocabulary, batch: Batch
    ) -> tuple[mx.array, dict[str, mx.array]]:
        """Compute the loss and, by position, sums over the batch's rows.

        Returns:
            tuple: The loss, and arrays [L - 1]: ``rows`` that count, of them ``best`` (the best
            token is right), ``among`` (the true token is a candidate) and ``chosen`` (the
            selector takes it), and ``best_prefix`` and ``chosen_prefix``, rows up to which
            everything is right.
        """
        rows, valid = _label_rows(batch, (self.block_size or drafter.block_size) - 1, vocabulary)
        rows["hidden"] = self._hidden(drafter, target, batch)
        flat = tree_map(lambda x: x.reshape(-1, *x.shape[3:]), rows)
        costs = self._in_turns(drafter, vocabulary, flat)
        costs = tree_map(lambda x: x.reshape(valid.shape), costs)
        return self._total(costs, valid), _counts(costs, valid)

    def _hidden(self, drafter: Drafter, target: TargetHead, batch: Batch) -> mx.array:
        """Run the blocks of all texts: hidden rows [N, A, L - 1, H]."""

        def run(tokens: mx.array, taps: mx.array, anchors: mx.array) -> mx.array:
            return run_blocks(drafter, target, tokens, taps, anchors, self.block_size)

        arrays = batch.tokens, batch.taps, batch.anchors
        if not self.checkpoint:
            return run(*arrays)

        def inner(parameters: dict[str, Any], *text: mx.array) -> mx.array:
            drafter.update(parameters)
            # A checkpoint asks for the gradient of all that it is given, and ids have none.
            tokens, taps, anchors = map(mx.stop_gradient, text)
            return run(tokens, taps, anchors)

        run_text, weights = mx.checkpoint(inner), drafter.trainable_parameters()
        texts = zip(*(mx.split(x, len(x)) for x in arrays), strict=True)
        return mx.concatenate([run_text(weights, *text) for text in texts])

    def _in_turns(self, drafter: Drafter, vocabulary: Vocabulary, rows: Rows) -> Rows:
        """Compute all rows' costs, a bounded number of logits at a time."""
        count, step = len(rows["labels"]), max(1, MAX_LOGITS // vocabulary.size)
        if count <= step:
            return self._costs(drafter, vocabulary, rows)

        def inner(parameters: dict[str, Any], some: Rows) -> Rows:
            drafter.update(parameters)
            # A checkpoint asks for the gradient of all that it is given, and ids have none.
            fixed = tree_map(mx.stop_gradient, some) | {"hidden": some["hidden"]}
            return self._costs(drafter, vocabulary, fixed)

        # What one turn computes on the way is computed again for the gradient, and not kept.
        turn, weights = mx.checkpoint(inner), drafter.trainable_parameters()
        parts = [
            turn(weights, {name: x[start : start + step] for name, x in rows.items()})
            for start in range(0, count, step)
        ]
        return {name: mx.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _costs(self, drafter: Drafter, vocabulary: Vocabulary, rows: Rows) -> Rows:
        """Compute arrays [M] of rows ``hidden`` [M, H] and of what they have to draft.

        Returns:
            dict: ``unary``, the cost of the logits; ``hard``, their cross entropy with the true
            token; ``best``, whether the best token is the true one; and with a selector ``among``,
            whether the true token is a candidate; ``choice``, the cost of the choice; ``logprob``,
            the log probability of the true token; ``chosen``, whether that is taken.
        """
        hidden, labels, final = rows["hidden"], rows["labels"], rows.get("final")
        scores = vocabulary.scores(hidden, labels, final)
        unary, hard = unary_loss(self.loss, scores.draft, scores.target, scores.label)
        # What is only counted: a checkpoint would ask for the gradient of the ids that it reads by.
        best = scores.ids[mx.argmax(mx.stop_gradient(scores.unary), axis=-1)] == labels
        costs = {"unary": unary, "hard": hard, "best": best}
        if not drafter.args.has_selector:
            return costs
        K, selector = drafter.args.selector_top_k, drafter.candidate_selector
        columns = mx.argpartition(mx.stop_gradient(-scores.unary), K - 1, axis=-1)[:, :K]
        is_label = scores.ids[columns] == labels[:, None]
        among = mx.any(is_label, axis=-1)
        unaries = mx.take_along_axis(scores.unary, columns, axis=-1)
        if self.detach_selector:
            hidden, unaries = mx.stop_gradient(hidden), mx.stop_gradient(unaries)
        gate = selector.hidden_projection(hidden)
        predecessors = selector.predecessors(rows["before"])
        successors = _successors(selector, scores.ids, columns)
        choice = score_pairs(unaries, gate, predecessors[:, None], successors)[:, 0]
        wanted = None
        if scores.target is not None:
            wanted = mx.exp(mx.take_along_axis(scores.target, columns, axis=-1))
        cost, logprob = selector_loss(choice, is_label, wanted)
        picked = mx.argmax(mx.stop_gradient(choice), axis=-1, keepdims=True)
        chosen = mx.take_along_axis(is_label, picked, axis=-1)[:, 0]
        return costs | {"among": among, "choice": cost, "logprob": logprob, "chosen": chosen}

    def _total(self, costs: Rows, valid: mx.array) -> mx.array:
        """Combine the costs of rows [N, A, L - 1] to the loss."""
        loss = self._mean(costs["unary"], self._weights(mx.exp(-costs["hard"]), valid), valid)
        if "choice" not in costs or self.selector_weight == 0:
            return loss
        right = mx.where(costs["among"], mx.exp(costs["logprob"]), 0.0)
        # A row without its true token among the candidates has nothing to choose, yet ends a path.
        weights = self._weights(right, valid) * costs["among"]
        return loss + self.selector_weight * self._mean(costs["choice"], weights, valid)

    def _mean(self, costs: mx.array, weights: mx.array, valid: mx.array) -> mx.array:
        if self.gamma is not None:
            return weighted_mean(costs, weights)
        # D-PACE's weights sum to a block's expected acceptance, which the loss has to raise: the
        # mean is over blocks.
        return (costs * weights).sum() / mx.maximum(valid.any(axis=-1).sum(), 1)

    def _weights(self, right: mx.array, valid: mx.array) -> mx.array:
        """Weigh the rows; ``right`` holds the probability that each is."""
        if self.gamma is None:
            return d_pace_weights(mx.stop_gradient(right), valid)
        return position_weights(valid.shape[-1], self.gamma) * valid


def _successors(selector: CandidateSelector, ids: mx.array, columns: mx.array) -> mx.array:
    """Look up the successor rows [M, K, R] of candidates, given as columns [M, K] of ids [C]."""
    factored = isinstance(selector.successor_codebook, FactoredCodebook)
    if factored and ids.size < columns.size:
        # Each row is a product: fewer are made where candidates repeat.
        return selector.successors(ids)[columns]
    return selector.successors(ids[columns])


def _label_rows(batch: Batch, length: int, vocabulary: Vocabulary) -> tuple[Rows, mx.array]:
    """Collect what the rows [N, A, L - 1] of every anchor's block have to draft.

    Returns:
        tuple: The true tokens ``labels``, those ``before`` them, and what the target's head reads
        to predict them, ``final`` with a last axis H, if the batch has it; and booleans, whether a
        row counts.
    """
    at = batch.anchors[..., None] + mx.arange(1, length + 1)
    valid = (at < batch.lengths[:, None, None]) & batch.used[..., None]
    shape, limit = at.shape, vocabulary.vocab_size
    at = mx.minimum(at, batch.tokens.shape[1] - 1).flatten(1)
    labels = mx.take_along_axis(batch.tokens, at, axis=1).reshape(shape)
    before = mx.take_along_axis(batch.tokens, at - 1, axis=1).reshape(shape)
    rows = {"labels": mx.minimum(labels, limit - 1), "before": before}
    if batch.final is not None:
        final = mx.take_along_axis(batch.final, (at - 1)[..., None], axis=1)
        rows["final"] = final.reshape(*shape, -1)
    return rows, valid & (labels < limit)


def _counts(costs: Rows, valid: mx.array) -> dict[str, mx.array]:
    """Sum by position what :meth:`Objective.__call__` returns beside the loss."""
    counts = {"rows": valid}
    counts |= {n: costs[n] & valid for n in ("best", "among", "chosen") if n in costs}
    for name in ("best", "chosen"):
        if name in counts:
            counts[f"{name}_prefix"] = mx.cumprod(counts[name].astype(mx.int32), axis=-1)
    return {name: value.astype(mx.int32).sum(axis=(0, 1)) for name, value in counts.items()}
