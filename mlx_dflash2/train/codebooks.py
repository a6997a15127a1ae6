"""Codebooks made from the target's embedding: E W, with only W to be trained."""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

CODEBOOKS = ("predecessor_codebook", "successor_codebook")
_ROWS = 8192


class FactoredCodebook(nn.Module):
    """A codebook whose row for a token is its embedding times a matrix.

    Args:
        embed (callable): From ids [n] to embeddings [n, H], which are not trained.
        weight (mx.array): [R, H].
    """

    def __init__(self, embed: Callable[[mx.array], mx.array], weight: mx.array):
        super().__init__()
        self.embed = embed
        self.weight = weight

    def __call__(self, ids: mx.array) -> mx.array:
        rows = self.embed(ids).astype(self.weight.dtype)
        return rows @ self.weight.T

    def table(self, vocab_size: int) -> mx.array:
        """All rows [V, R], as an ordinary codebook holds them."""
        ids = mx.arange(vocab_size)
        parts = [self(ids[start : start + _ROWS]) for start in range(0, vocab_size, _ROWS)]
        return mx.concatenate(parts)


def factor(embed: Callable[[mx.array], mx.array], table: mx.array) -> FactoredCodebook:
    """The factored codebook nearest to a table [V, R], by least squares."""
    rows = embed(mx.arange(table.shape[0])).astype(mx.float32)
    # The normal equations are as small as the embedding is wide.
    gram = rows.T @ rows
    gram = gram + 1e-6 * mx.trace(gram) / gram.shape[0] * mx.eye(gram.shape[0])
    weight = mx.linalg.solve(gram, rows.T @ table.astype(mx.float32), stream=mx.cpu)
    return FactoredCodebook(embed, weight.T)


def unfactored(selector: nn.Module, vocab_size: int):
    """Replace a selector's factored codebooks by ordinary ones, in place."""
    for name in CODEBOOKS:
        if isinstance(selector[name], FactoredCodebook):
            table = selector[name].table(vocab_size)
            selector[name] = nn.Embedding(1, 1)
            selector[name].weight = table
