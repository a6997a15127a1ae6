"""Log probabilities of drafter and target, over the vocabulary or a sample that stands for it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ..drafter.args import DrafterArgs

# Numbers of a logits array that may live at once: more rows are taken in turns.
MAX_LOGITS = 2**25
# Finite, since 0 times infinity is no number.
_NEVER = -1e9


class Scores(NamedTuple):
    """Log probabilities of M rows over C columns, float32.

    ``draft`` and ``target`` [M, C] (``target`` may be ``None``); ``label`` [M] the column of the
    true token; ``unary`` [M, C'] the drafter's transformed logits of the columns that may be
    candidates, and ``ids`` [C'] those columns' token ids.
    """

    draft: mx.array
    target: mx.array | None
    label: mx.array
    unary: mx.array
    ids: mx.array


def draft_transform(logits: mx.array, args: DrafterArgs) -> mx.array:
    """The multiplier and soft cap with which a drafter's logits are served, in float32."""
    logits = logits.astype(mx.float32) * args.output_multiplier
    cap = args.final_logit_softcapping
    return cap * mx.tanh(logits / cap) if cap else logits


@dataclass
class FullVocabulary:
    """Every id that may be drafted."""

    target: Any
    args: DrafterArgs

    @property
    def vocab_size(self) -> int:
        """Ids that may be drafted."""
        limits = self.target.vocab_size, self.args.vocab_size, self.args.selector_vocab_size
        return min(limit for limit in limits if limit)

    @property
    def size(self) -> int:
        """Columns of a row."""
        return self.vocab_size

    def draw(self, key: mx.array) -> "FullVocabulary":
        """For one step: nothing is drawn."""
        return self

    def scores(self, hidden: mx.array, labels: mx.array, final: mx.array | None) -> Scores:
        """Score rows.

        Shapes:
          - hidden: [M, H] of the drafter; labels: [M] ids below ``vocab_size``
          - final: [M, H], what the target's head reads where it predicts the labels, or ``None``
        """
        size = self.size
        unary = draft_transform(self.target.head(hidden)[..., :size], self.args)
        wanted = None
        if final is not None:
            # What the target gives to ids that cannot be drafted is lost, and not shared out.
            wanted = log_softmax(self.target.logits(final).astype(mx.float32))[..., :size]
        return Scores(log_softmax(unary), wanted, labels, unary, mx.arange(size))


class SampledVocabulary:
    """The most frequent ids, a fresh sample of all others each step, and each row's own label.

    The sample stands for all ids that it was drawn from: its logits are raised by the logarithm
    of how many each of them stands for, so that sums over the columns estimate sums over the
    vocabulary without bias. A row whose label is none of the frequent ids has it in a column of
    its own, and not in the sample.

    Args:
        target (Target): The target.
        args (DrafterArgs): The drafter's.
        frequent (np.ndarray): Distinct ids that are always there; only these are candidates.
        negatives (int): Size of the sample, at most the ids that are not frequent.

    Raises:
        ValueError: as :func:`refuse_sample`.
    """

    def __init__(self, target: Any, args: DrafterArgs, frequent: np.ndarray, negatives: int):
        self.target, self.args = target, args
        refuse_sample(target, args, len(frequent), negatives)
        vocab_size = FullVocabulary(target, args).vocab_size
        others = np.setdiff1d(np.arange(vocab_size), frequent)
        self.negatives, self.vocab_size = negatives, vocab_size
        self.frequent, self.others = mx.array(frequent), mx.array(others)
        self.rows = target.head_rows(self.frequent).astype(mx.float32)
        column = np.full(vocab_size, -1, np.int32)
        column[frequent] = np.arange(len(frequent))
        self.column = mx.array(column)
        self.sample = self.sample_rows = None

    @property
    def size(self) -> int:
        """Columns of a row."""
        return self.frequent.size + self.negatives + 1

    def draw(self, key: mx.array) -> "SampledVocabulary":
        """The same with the sample of one step."""
        drawn = object.__new__(SampledVocabulary)
        vars(drawn).update(vars(self))
        order = mx.random.permutation(self.others.size, key=key)[: self.negatives]
        drawn.sample = self.others[order]
        drawn.sample_rows = self.target.head_rows(drawn.sample).astype(mx.float32)
        return drawn

    def scores(self, hidden: mx.array, labels: mx.array, final: mx.array | None) -> Scores:
        """As :meth:`FullVocabulary.scores`, over the columns frequent, sample, own label."""
        column = self.column[labels]
        own = column < 0
        hits = self.sample[None] == labels[:, None]
        stand_for = (self.others.size - own) / (self.negatives - hits.sum(axis=1))
        lift = mx.where(hits, _NEVER, mx.log(stand_for)[:, None])
        label_rows = self.target.head_rows(labels).astype(mx.float32)

        def joined(
            hidden: mx.array, transform: Callable[[mx.array], mx.array]
        ) -> tuple[mx.array, mx.array]:
            hidden = hidden.astype(mx.float32)
            frequent = transform(hidden @ self.rows.T)
            sample = transform(hidden @ self.sample_rows.T) + lift
            label = transform((hidden * label_rows).sum(axis=-1, keepdims=True))
            label = mx.where(own[:, None], label, _NEVER)
            return frequent, log_softmax(mx.concatenate([frequent, sample, label], axis=-1))

        unary, draft = joined(hidden, lambda logits: draft_transform(logits, self.args))
        wanted = None
        if final is not None:
            _, wanted = joined(final, self.target.transform)
        label = mx.where(own, self.size - 1, column)
        return Scores(draft, wanted, label, unary, self.frequent)


def refuse_sample(target: Any, args: DrafterArgs, frequent: int, negatives: int):
    """Refuse so many frequent ids and negatives if they can be no :class:`SampledVocabulary`.

    Raises:
        ValueError: if there are fewer frequent ids than candidates or not enough others, or if the
            target's head is more than one matrix.
    """
    size = FullVocabulary(target, args).vocab_size
    if not args.selector_top_k <= frequent < size:
        raise ValueError(
            f"`vocab_sample` is {frequent} but has to be from `selector_top_k`, "
            f"{args.selector_top_k}, to {size - 1}: fewer than the vocabulary's ids."
        )
    if not 0 < negatives <= size - frequent:
        raise ValueError(
            f"`negatives` is {negatives} but has to be from 1 to {size - frequent}, the ids that "
            "are not frequent."
        )
    target.head_rows(mx.array([0]))


def most_frequent(tokens: np.ndarray, count: int, vocab_size: int) -> np.ndarray:
    """The ids that occur most often in a text, the lower id first where two are level."""
    counts = np.bincount(tokens[tokens < vocab_size], minlength=vocab_size)
    return np.sort(np.argsort(-counts, kind="stable")[:count])


def log_softmax(x: mx.array) -> mx.array:
    """Over the last axis."""
    return x - mx.logsumexp(x, axis=-1, keepdims=True)
