"""The rounds that a drafter would need for a text that is known."""

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_dflash2.drafter.logits import best_tokens
from mlx_dflash2.drafter.model import Drafter
from mlx_dflash2.evaluation.teacher_forced import CANDIDATES
from mlx_dflash2.targets import Target
from mlx_dflash2.train.blocks import run_blocks
from mlx_dflash2.train.corpus import Corpus
from mlx_dflash2.train.taps import TapSource, padded_tokens

_ANCHORS = 32


class Chain(NamedTuple):
    """The rounds of each text, by the rule that chooses the drafts; arrays [texts].

    Attributes:
        tokens (np.ndarray): Tokens that the rounds give.
        best (np.ndarray): Rounds if each row's best token is drafted.
        path (np.ndarray): Rounds if the selector's path is drafted.
        oracle (np.ndarray): Rounds if the true token is drafted wherever it is a candidate.
    """

    tokens: np.ndarray
    best: np.ndarray
    path: np.ndarray
    oracle: np.ndarray

    def lengths(self) -> dict[str, float]:
        """Compute the acceptance lengths, bonus included, pooled over all texts."""
        total = self.tokens.sum()
        return {name: float(total / getattr(self, name).sum()) for name in self._fields[1:]}


def chain(
    drafter: Drafter, target: Target, corpus: Corpus, source: TapSource, texts: Sequence[int]
) -> Chain:
    """Count the rounds that greedy decoding of texts takes, without decoding them again.

    Decoding is lossless: where a text is the target's greedy answer, its rounds are those of the
    decoding loop, up to the rounding of batched passes.

    Args:
        drafter (Drafter): Ready to draft.
        target (Target): Its target.
        corpus (Corpus): The target's greedy answers.
        source (TapSource): Their taps.
        texts (sequence of int): Which ones, by number; those without a round are left out.
    """
    rows = []
    for text in texts:
        tokens, start, _ = corpus[text]
        # The prompt's pass gives the first token; without a second one there is no round.
        if len(tokens) - start < 2:
            continue
        hits = _hits(drafter, target, corpus, source, text)
        rows.append(
            [len(tokens) - start - 1, *(count_rounds(h, len(tokens) - start) for h in hits)]
        )
    return Chain(*np.array(rows).T)


def _hits(
    drafter: Drafter, target: Target, corpus: Corpus, source: TapSource, text: int
) -> list[np.ndarray]:
    """Count the leading right drafts at every anchor of an answer, for each rule of a chain."""
    tokens, start, _ = corpus[text]
    shown = source.read([text], len(tokens))
    padded = mx.array(padded_tokens(corpus, [text], len(tokens))).astype(mx.int32)
    parts = []
    for first in range(start, len(tokens) - 1, _ANCHORS):
        anchors = mx.arange(first, min(first + _ANCHORS, len(tokens) - 1))
        hidden = run_blocks(drafter, target, padded, shown.taps, anchors[None])[0]
        parts.append(_leading(drafter, target, padded[0], anchors, hidden))
        mx.eval(parts[-1])
    return [np.concatenate(column) for column in zip(*parts, strict=True)]


def _leading(
    drafter: Drafter, target: Target, tokens: mx.array, anchors: mx.array, hidden: mx.array
) -> list[mx.array]:
    """Count them at some anchors, from the drafter's hidden rows [anchors, L - 1, H]."""
    args, length = drafter.args, drafter.block_size - 1
    at = anchors[:, None] + mx.arange(1, length + 1)
    truth = mx.where(at < tokens.size, tokens[mx.minimum(at, tokens.size - 1)], -1)
    logits = drafter.head(target, hidden)
    if args.has_selector:
        found = drafter.candidate_selector(tokens[anchors], hidden, logits)
        path, ids = found.tokens, found.candidates
    else:
        _, ids = best_tokens(logits, CANDIDATES, args)
        path = ids[..., 0]
    is_truth = ids.astype(truth.dtype) == truth[..., None]
    hits = is_truth[..., 0], path.astype(truth.dtype) == truth, mx.any(is_truth, axis=-1)
    return [mx.cumprod(hit.astype(mx.int32), axis=-1).sum(axis=-1) for hit in hits]


def count_rounds(leading: np.ndarray, length: int) -> int:
    """Count the rounds from an answer's first token to its last; each ends with a bonus."""
    at, rounds = 0, 0
    while at < length - 1:
        at += 1 + int(leading[at])
        rounds += 1
    return rounds
