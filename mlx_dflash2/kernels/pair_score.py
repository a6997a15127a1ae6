"""Scores of all pairs of adjacent candidates of a block at once."""

import mlx.core as mx

from ._common import MAX_K, build, pattern, use_kernel

# Floats of threadgroup memory for the staged columns of both codebooks.
_STAGE = 5120
_MAX_THREADS = 512


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


def pair_score_kernel(
    anchor: mx.array,
    candidates: mx.array,
    unary: mx.array,
    gate: mx.array,
    predecessor: mx.array,
    successor: mx.array,
) -> mx.array:
    """As :func:`pair_score_ops`, in one launch; ids past the codebooks read their last row."""
    B, L, K = candidates.shape
    R = predecessor.shape[-1]
    threads = min(_MAX_THREADS, -(-K * K // 32) * 32)
    widest = max(32, (_STAGE // (2 * K) - 1) // 32 * 32)
    names = ("anchor", "candidates", "unary", "gate", "predecessor", "successor")
    return build("pair_score", names, ("scores",))(
        inputs=[anchor, candidates, unary.astype(mx.float32), gate, predecessor, successor],
        template=[("K", K), ("R", R), ("CHUNK", min(R, widest)), ("THREADS", threads)],
        grid=(threads, L, B),
        threadgroup=(threads, 1, 1),
        output_shapes=[(B, L, K, K)],
        output_dtypes=[mx.float32],
    )[0]


def example_inputs(
    candidates: mx.array, gate: mx.array, predecessor: mx.array, successor: mx.array
) -> tuple[mx.array, ...]:
    """Inputs of the same specialisation: the given tables, two positions, three hundred ids."""
    K, R = candidates.shape[-1], gate.shape[-1]
    V = min(predecessor.shape[0], 300)
    ids = (mx.arange(2 * K, dtype=mx.uint32) * 7 % V).astype(candidates.dtype).reshape(1, 2, K)
    return (
        mx.zeros((1,), candidates.dtype),
        ids,
        pattern((1, 2, K), salt=2),
        pattern((1, 2, R), gate.dtype, salt=3),
        pattern((V, R), predecessor.dtype, salt=4),
        pattern((V, R), successor.dtype, salt=5),
    )


def pair_score(
    anchor: mx.array,
    candidates: mx.array,
    unary: mx.array,
    gate: mx.array,
    predecessor: mx.array,
    successor: mx.array,
) -> mx.array:
    """:func:`pair_score_kernel` where it runs, else :func:`pair_score_ops`."""
    form = pair_score_ops
    K, R = candidates.shape[-1], gate.shape[-1]
    if K <= MAX_K and candidates.size > 0:
        specialisation = (K, R, candidates.dtype, gate.dtype, predecessor.dtype, successor.dtype)

        def example() -> tuple:
            return example_inputs(candidates, gate, predecessor, successor)

        if use_kernel(pair_score_kernel, pair_score_ops, specialisation, example):
            form = pair_score_kernel
    return form(anchor, candidates, unary, gate, predecessor, successor)
