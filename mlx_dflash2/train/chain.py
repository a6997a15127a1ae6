"""Decoding a text that is known: the rounds that a drafter would need for it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ..drafter.model import Drafter
from ..evaluation.teacher_forced import CANDIDATES
from ..kernels import top_k
from .blocks import run_blocks
from .corpus import Corpus
from .taps import TapSource, padded_tokens

_ANCHORS = 32


class Chain(NamedTuple):
    """Acceptance lengths (bonus included) of each text, and its rounds, by what chooses drafts.

    Arrays of a number a text: ``tokens`` given by rounds, and the rounds needed if each row's
    best token is drafted (``best``), the selector's path (``path``), or the true token wherever
    it is a candidate (``oracle``).
    """

    tokens: np.ndarray
    best: np.ndarray
    path: np.ndarray
    oracle: np.ndarray

    def lengths(self) -> dict[str, float]:
        """Pooled over all texts."""
        total = self.tokens.sum()
        return {name: float(total / getattr(self, name).sum()) for name in self._fields[1:]}


def chain(
    drafter: Drafter, target: Any, corpus: Corpus, source: TapSource, texts: Sequence[int]
) -> Chain:
    """Count the rounds that greedy decoding of texts takes, without decoding them again.

    Decoding is lossless: where a text is the target's greedy answer its rounds are those of the
    ordinary loop, up to the rounding of batched passes.

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
        rows.append([len(tokens) - start - 1, *(_rounds(h, len(tokens) - start) for h in hits)])
    return Chain(*np.array(rows).T)


def _hits(
    drafter: Drafter, target: Any, corpus: Corpus, source: TapSource, text: int
) -> list[np.ndarray]:
    """Leading right drafts at every anchor of an answer: best, path, oracle."""
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
    drafter: Drafter, target: Any, tokens: mx.array, anchors: mx.array, hidden: mx.array
) -> list[mx.array]:
    """The same at some anchors, from the drafter's rows there."""
    args, length = drafter.args, drafter.block_size - 1
    at = anchors[:, None] + mx.arange(1, length + 1)
    truth = mx.where(at < tokens.size, tokens[mx.minimum(at, tokens.size - 1)], -1)
    logits = drafter.head(target, hidden)
    if args.has_selector:
        found = drafter.candidate_selector(tokens[anchors], hidden, logits)
        path, ids = found.tokens, found.candidates
    else:
        transform = args.output_multiplier, args.final_logit_softcapping
        _, ids = top_k(logits, CANDIDATES, *transform)
        path = ids[..., 0]
    is_truth = ids.astype(truth.dtype) == truth[..., None]
    hits = is_truth[..., 0], path.astype(truth.dtype) == truth, mx.any(is_truth, axis=-1)
    return [mx.cumprod(hit.astype(mx.int32), axis=-1).sum(axis=-1) for hit in hits]


def _rounds(leading: np.ndarray, length: int) -> int:
    """Rounds from an answer's first token to its last, each giving its leading hits and one."""
    at, rounds = 0, 0
    while at < length - 1:
        at += 1 + int(leading[at])
        rounds += 1
    return rounds
