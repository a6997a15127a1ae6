"""Log probabilities of drafter and target, over the vocabulary or a sample that stands for it."""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..drafter.args import DrafterArgs
from ..drafter.logits import draft_logits, drafted_vocab_size, transform
from ..targets import Target

# Numbers of a logits array that may live at once: more rows are taken in turns.
MAX_LOGITS = 2**25
# Finite, since 0 times infinity is NaN.
_NEVER = -1e9


class Scores(NamedTuple):
    """Log probabilities of M rows over C columns, float32.

    Attributes:
        draft (mx.array): The drafter's, [M, C].
        target (mx.array, optional): The target's, [M, C].
        label (mx.array): The column of the true token, [M].
        unary (mx.array): The drafter's transformed logits [M, C'] of the columns that may be
            candidates.
        ids (mx.array): Token ids [C'] of those columns.
    """

    draft: mx.array
    target: mx.array | None
    label: mx.array
    unary: mx.array
    ids: mx.array


class Vocabulary(Protocol):
    """The columns over which the rows of one step are scored."""

    @property
    def vocab_size(self) -> int:
        """How many ids may be drafted."""

    @property
    def size(self) -> int:
        """Columns of a row."""

    def draw(self, key: mx.array) -> "Vocabulary":
        """Return the vocabulary of one step, which may be a sample."""

    def scores(self, hidden: mx.array, labels: mx.array, final: mx.array | None) -> Scores:
        """Score rows.

        Args:
            hidden (mx.array): Of the drafter, [M, H].
            labels (mx.array): True ids [M] below ``vocab_size``.
            final (mx.array, optional): What the target's head reads to predict them, [M, H].
        """


@dataclass(frozen=True)
class FullVocabulary(Vocabulary):
    """Every id that may be drafted."""

    target: Target
    args: DrafterArgs

    @property
    def vocab_size(self) -> int:
        return drafted_vocab_size(self.target, self.args)

    @property
    def size(self) -> int:
        return self.vocab_size

    def draw(self, key: mx.array) -> Vocabulary:
        return self

    def scores(self, hidden: mx.array, labels: mx.array, final: mx.array | None) -> Scores:
        unary = transform(draft_logits(self.target, hidden, self.args), self.args)
        wanted = None
        if final is not None:
            # What the target gives to ids that cannot be drafted is lost, and not shared out.
            logits = self.target.logits(final).astype(mx.float32)
            wanted = nn.log_softmax(logits)[..., : self.size]
        return Scores(nn.log_softmax(unary), wanted, labels, unary, mx.arange(self.size))


class SampledVocabulary(Vocabulary):
    """The most frequent ids, and all others, of which each step draws a sample.

    The sample stands for all ids that it was drawn from: its logits are raised by the logarithm
    of how many each of them stands for, so that sums over the columns estimate sums over the
    vocabulary without bias. A row whose label is not frequent has it in its own column, and not in
    the sample.

    Args:
        target (Target): The target.
        args (DrafterArgs): The drafter's.
        frequent (np.ndarray): Distinct ids that are always there; only these are candidates.
        negatives (int): Size of the sample, at most the ids that are not frequent.

    Raises:
        ValueError: as :func:`refuse_sample`.
    """

    def __init__(
        self, target: Target, args: DrafterArgs, frequent: np.ndarray, negatives: int
    ) -> None:
        self.target, self.args = target, args
        refuse_sample(target, args, len(frequent), negatives)
        self.negatives = negatives
        others = np.setdiff1d(np.arange(self.vocab_size), frequent)
        self.frequent, self.others = mx.array(frequent), mx.array(others)
        self.head_rows = target.head_rows(self.frequent).astype(mx.float32)
        column = np.full(self.vocab_size, -1, np.int32)
        column[frequent] = np.arange(len(frequent))
        self.column = mx.array(column)
        # Ids and rows of the head; empty until they are drawn.
        self.sample, self.sample_rows = mx.array([], mx.int32), self.head_rows[:0]

    @property
    def vocab_size(self) -> int:
        return drafted_vocab_size(self.target, self.args)

    @property
    def size(self) -> int:
        return self.frequent.size + self.negatives + 1

    def draw(self, key: mx.array) -> "SampledVocabulary":
        """Return the vocabulary of one step, with its sample drawn."""
        drawn = copy(self)
        order = mx.random.permutation(self.others.size, key=key)[: self.negatives]
        drawn.sample = self.others[order]
        drawn.sample_rows = self.target.head_rows(drawn.sample).astype(mx.float32)
        return drawn

    def scores(self, hidden: mx.array, labels: mx.array, final: mx.array | None) -> Scores:
        column = self.column[labels]
        own = column < 0
        hits = self.sample[None] == labels[:, None]
        stand_for = (self.others.size - own) / (self.negatives - hits.sum(axis=1))
        lift = mx.where(hits, _NEVER, mx.log(stand_for)[:, None])
        label_rows = self.target.head_rows(labels).astype(mx.float32)

        def joined(
            hidden: mx.array, transformed: Callable[[mx.array], mx.array]
        ) -> tuple[mx.array, mx.array]:
            hidden = hidden.astype(mx.float32)
            frequent = transformed(hidden @ self.head_rows.T)
            sample = transformed(hidden @ self.sample_rows.T) + lift
            label = transformed((hidden * label_rows).sum(axis=-1, keepdims=True))
            label = mx.where(own[:, None], label, _NEVER)
            return frequent, nn.log_softmax(mx.concatenate([frequent, sample, label], axis=-1))

        unary, draft = joined(hidden, lambda logits: transform(logits, self.args))
        wanted = None
        if final is not None:
            _, wanted = joined(final, self.target.transform)
        label = mx.where(own, self.size - 1, column)
        return Scores(draft, wanted, label, unary, self.frequent)


def refuse_sample(target: Target, args: DrafterArgs, frequent: int, negatives: int) -> None:
    """Refuse numbers of frequent ids and negatives that :class:`SampledVocabulary` cannot have.

    Raises:
        ValueError: if there are fewer frequent ids than candidates or not enough others, or if the
            target's head is more than one matrix.
    """
    size = drafted_vocab_size(target, args)
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
    """Find the ids that occur most often in a text; of two that are level, the lower one."""
    counts = np.bincount(tokens[tokens < vocab_size], minlength=vocab_size)
    return np.sort(np.argsort(-counts, kind="stable")[:count])
