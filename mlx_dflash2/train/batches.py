"""Choose the texts and anchors of each step: a function of seed and step alone."""

from collections.abc import Sequence
from functools import lru_cache

import mlx.core as mx
import numpy as np

from .corpus import Corpus
from .objective import Batch
from .taps import TapSource, padded_tokens

# Texts are sorted by length within this many batches, to keep padding small.
_POOL = 32


class Batches:
    """The batches of a training run.

    Args:
        corpus, source: The texts and their taps.
        texts (sequence of int): The numbers of the texts to use.
        batch_size (int): Texts per batch.
        anchors (int): Anchors per text, fewer for short ones.
        max_seq_length (int): Longer texts are cut.
        seed (int): Of all random draws.

    Raises:
        ValueError: if too few texts have an answer of at least two tokens within that length.
    """

    def __init__(
        self,
        corpus: Corpus,
        source: TapSource,
        texts: Sequence[int],
        *,
        batch_size: int,
        anchors: int,
        max_seq_length: int,
        seed: int,
    ) -> None:
        self.corpus, self.source = corpus, source
        self.batch_size, self.anchors, self.seed = batch_size, anchors, seed
        self.max_seq_length = max_seq_length
        self._order = lru_cache(1)(self._draw_order)
        numbers = np.asarray(texts)
        self.texts = numbers[self._spans(numbers) > 0]
        if len(self.texts) < batch_size:
            raise ValueError(
                f"{len(self.texts)} texts have an answer of two tokens within "
                f"{max_seq_length} tokens, but a batch takes {batch_size}."
            )

    def _lengths(self, texts: np.ndarray) -> np.ndarray:
        return np.minimum(self.corpus.lengths[texts], self.max_seq_length)

    def _spans(self, texts: np.ndarray) -> np.ndarray:
        """Count each text's possible anchors: positions of the answer with a token after them."""
        return self._lengths(texts) - 1 - self.corpus.prompt_lengths[texts]

    @property
    def per_epoch(self) -> int:
        """Batches per epoch."""
        return len(self.texts) // self.batch_size

    def batch(self, number: int) -> Batch:
        """Return a batch by its number, counted over all epochs."""
        epoch, index = divmod(number, self.per_epoch)
        texts = self._order(epoch)[index]
        rng = np.random.default_rng([self.seed, 1, number])
        lengths = self._lengths(texts)
        anchors, used = self._draw_anchors(texts, rng)
        found = self.source.read(texts, int(lengths.max()))
        tokens = padded_tokens(self.corpus, texts, int(lengths.max()))
        arrays = (mx.array(x) for x in (lengths, anchors, used))
        return Batch(mx.array(tokens), found.taps, found.final, *arrays)

    def _draw_order(self, epoch: int) -> np.ndarray:
        """Return the texts of an epoch's batches, [batches, batch size]."""
        rng = np.random.default_rng([self.seed, 0, epoch])
        texts = rng.permutation(self.texts)[: self.per_epoch * self.batch_size]
        pools = range(0, len(texts), _POOL * self.batch_size)
        for start in pools:
            pool = texts[start : start + _POOL * self.batch_size]
            texts[start : start + len(pool)] = pool[np.argsort(self._lengths(pool), kind="stable")]
        return rng.permutation(texts.reshape(-1, self.batch_size))

    def _draw_anchors(
        self, texts: np.ndarray, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        spans = self._spans(texts)
        count = int(min(self.anchors, spans.max()))
        anchors = np.zeros((len(texts), count), np.int32)
        used = np.zeros((len(texts), count), bool)
        for row, (text, span) in enumerate(zip(texts, spans, strict=True)):
            drawn = np.sort(rng.choice(span, min(count, span), replace=False))
            anchors[row, : len(drawn)] = drawn + self.corpus.prompt_lengths[text]
            used[row, : len(drawn)] = True
        return anchors, used
