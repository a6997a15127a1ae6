"""Codebooks made from the target's embedding: E W, where only W is trained."""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

CODEBOOKS = ("predecessor_codebook", "successor_codebook")
_ROWS = 8192

Embed = Callable[[mx.array], mx.array]


class FactoredCodebook(nn.Module):
    """A codebook whose row for a token is the token's embedding times a matrix.

    Args:
        embed (callable): From ids [n] to embeddings [n, H], which are not trained.
        weight (mx.array): [R, H].
    """

    def __init__(self, embed: Embed, weight: mx.array) -> None:
        super().__init__()
        self.embed = embed
        self.weight = weight

    def __call__(self, ids: mx.array) -> mx.array:
        return self.embed(ids).astype(self.weight.dtype) @ self.weight.T

    def table(self, vocab_size: int) -> mx.array:
        """Return all rows [V, R], as an ordinary codebook holds them."""
        ids = mx.arange(vocab_size)
        parts = [self(ids[start : start + _ROWS]) for start in range(0, vocab_size, _ROWS)]
        return mx.concatenate(parts)


def factor(embed: Embed, table: mx.array) -> FactoredCodebook:
    """Return the factored codebook nearest to a table [V, R], by least squares."""
    rows = embed(mx.arange(table.shape[0])).astype(mx.float32)
    # The normal equations are only as large as the embedding is wide.
    gram = rows.T @ rows
    gram = gram + 1e-6 * mx.trace(gram) / gram.shape[0] * mx.eye(gram.shape[0])
    weight = mx.linalg.solve(gram, rows.T @ table.astype(mx.float32), stream=mx.cpu)
    return FactoredCodebook(embed, weight.T)


def factor_codebooks(selector: nn.Module, embed: Embed, known: bool) -> mx.array:
    """Factor a selector's codebooks through the target's embedding, in place and lazily.

    Args:
        selector (CandidateSelector): With ordinary codebooks.
        embed (callable): The target's, from ids to rows.
        known (bool): Approximate the tables; otherwise start as a selector without effect.

    Returns:
        mx.array: The share of a table's norm that is kept, the lower of the two.
    """
    kept = mx.array(1.0)
    for name in CODEBOOKS:
        table = selector[name].weight
        if known:
            selector[name] = factor(embed, table)
            before = mx.linalg.norm(table.astype(mx.float32))
            share = mx.linalg.norm(selector[name].table(len(table))) / mx.maximum(before, 1e-30)
            kept = mx.minimum(kept, mx.where(before > 0, share, 1.0))
        else:
            width = embed(mx.array([0])).shape[-1]
            scale = 0.0 if name.startswith("successor") else width**-0.5
            weight = scale * mx.random.normal((table.shape[1], width), key=mx.random.key(0))
            selector[name] = FactoredCodebook(embed, weight)
    return kept


def unfactored(selector: nn.Module, vocab_size: int) -> None:
    """Replace a selector's factored codebooks by ordinary ones, in place."""
    for name in CODEBOOKS:
        if isinstance(selector[name], FactoredCodebook):
            table = selector[name].table(vocab_size)
            selector[name] = nn.Embedding(1, 1)
            selector[name].weight = table
