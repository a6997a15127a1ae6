"""What the tests of training share: a corpus of a tiny target's own greedy answers."""

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_dflash2.train.corpus import Corpus, Text, write_shard
from mlx_dflash2.train.taps import TextTaps
from support.tiny import VOCAB, plain_tokens


def random_corpus(folder: Path, lengths: list[int], prompts: list[int]) -> Corpus:
    """Random texts of these lengths, in one shard."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    texts = [Text(rng.integers(0, VOCAB, n), p) for n, p in zip(lengths, prompts, strict=True)]
    write_shard(folder / "shard-00000.npz", texts)
    return Corpus(folder)


def greedy_corpus(
    folder: Path, model: nn.Module, texts: int, tokens: int, vocab_size: int = VOCAB
) -> Corpus:
    """What a target itself says to random prompts of four ids."""
    rng = np.random.default_rng(1)
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for _ in range(texts):
        prompt = rng.integers(0, vocab_size, 4).tolist()
        found.append(Text(np.array(prompt + plain_tokens(model, prompt, tokens)), 4))
    write_shard(folder / "shard-00000.npz", found)
    return Corpus(folder)


class NoTaps:
    """A tap source without taps that remembers which texts were asked for."""

    def __init__(self):
        self.asked = []

    def read(self, texts, length: int) -> TextTaps:
        self.asked.append([int(text) for text in texts])
        return TextTaps(mx.zeros((len(texts), length, 1)), None)
