"""Scores of all pairs of adjacent candidates of a block at once."""

import mlx.core as mx


def pair_score_ops(
    anchor: mx.array,
    candidates: mx.array,
    unary: mx.array,
    gate: mx.array,
    predecessor: mx.array,
    successor: mx.array,
) -> mx.array:
    """S_t(a, b) = U_t(b) + <A(a) * g_t, B(b)> for each candidate b and each predecessor a.

    The predecessors at position t are the candidates of position t - 1. The first position has
    one predecessor, the anchor: all K rows there are equal. Products and sums are float32.

    Shapes:
      - anchor: [B] token ids
      - candidates: [B, L, K] token ids
      - unary: [B, L, K] float32
      - gate: [B, L, R], the projected hidden row of each position
      - predecessor, successor: [V, R] codebooks A and B
    Returns:
      - scores: [B, L, K, K] float32, indexed [batch, position, predecessor, candidate]
    """
    B, _, K = candidates.shape
    first = mx.broadcast_to(anchor.astype(candidates.dtype)[:, None, None], (B, 1, K))
    previous = mx.concatenate([first, candidates[:, :-1]], axis=1)
    a = predecessor[previous].astype(mx.float32) * gate.astype(mx.float32)[:, :, None]
    b = successor[candidates].astype(mx.float32)
    return unary[:, :, None].astype(mx.float32) + a @ b.swapaxes(-1, -2)


pair_score = pair_score_ops
