"""Scores of all pairs of adjacent candidates of a block at once."""

from typing import NamedTuple

import mlx.core as mx

from ._common import LIBRARY, MAX_K, Op, Probe, patterns

# Floats of threadgroup memory for the staged columns of both codebooks.
_STAGE = 5120
_MAX_THREADS = 512


class PairInputs(NamedTuple):
    """What pair scores are computed from; ids beyond a codebook read its last row.

    Attributes:
        anchor (mx.array): Token ids [B].
        candidates (mx.array): Token ids [B, L, K].
        unary (mx.array): The candidates' own scores, [B, L, K].
        gate (mx.array): The projected hidden row of each position, [B, L, R].
        predecessor (mx.array): Codebook A, [V, R].
        successor (mx.array): Codebook B, [V, R].
    """

    anchor: mx.array
    candidates: mx.array
    unary: mx.array
    gate: mx.array
    predecessor: mx.array
    successor: mx.array


def score_pairs(unary: mx.array, gate: mx.array, before: mx.array, after: mx.array) -> mx.array:
    """Compute S(a, b) = U(b) + <A(a) * g, B(b)> from rows of the codebooks, in float32.

    Args:
        unary (mx.array): U, [..., K].
        gate (mx.array): g, [..., R].
        before (mx.array): A's rows of the predecessors, [..., P, R].
        after (mx.array): B's rows of the candidates, [..., K, R].

    Returns:
        mx.array: [..., P, K] float32.
    """
    gated = before.astype(mx.float32) * gate.astype(mx.float32)[..., None, :]
    pairs = gated @ after.astype(mx.float32).swapaxes(-1, -2)
    return unary.astype(mx.float32)[..., None, :] + pairs


def pair_score_ops(x: PairInputs) -> mx.array:
    """Compute :func:`score_pairs` for each candidate and each predecessor.

    The predecessors at position t are the candidates of position t - 1. The first position has
    one predecessor, the anchor: all K rows there are equal.

    To be used where every score is wanted; :func:`pair_walk` scores only the pairs on its path.

    Args:
        x (PairInputs): A block for each row of the batch.

    Returns:
        mx.array: [B, L, K, K] float32, indexed [batch, position, predecessor, candidate].
    """
    B, _, K = x.candidates.shape
    first = mx.broadcast_to(x.anchor.astype(x.candidates.dtype)[:, None, None], (B, 1, K))
    ids = mx.concatenate([first, x.candidates], axis=1)
    ids = mx.minimum(ids, x.predecessor.shape[0] - 1)
    return score_pairs(x.unary, x.gate, x.predecessor[ids[:, :-1]], x.successor[ids[:, 1:]])


def pair_score_kernel(x: PairInputs) -> mx.array:
    """Compute :func:`pair_score_ops` in one launch."""
    B, L, K = x.candidates.shape
    R = x.gate.shape[-1]
    threads = min(_MAX_THREADS, -(-K * K // 32) * 32)
    widest = max(32, (_STAGE // (2 * K) - 1) // 32 * 32)
    return LIBRARY.kernel("pair_score", PairInputs._fields, ("scores",))(
        inputs=[*x._replace(unary=x.unary.astype(mx.float32))],
        template=[("K", K), ("R", R), ("CHUNK", min(R, widest)), ("THREADS", threads)],
        grid=(threads, L, B),
        threadgroup=(threads, 1, 1),
        output_shapes=[(B, L, K, K)],
        output_dtypes=[mx.float32],
    )[0]


def pair_probe(x: PairInputs) -> Probe | None:
    """Describe a kernel on pair inputs; the example has two positions and at most 300 ids."""
    K, R = x.candidates.shape[-1], x.gate.shape[-1]
    if K > MAX_K or x.candidates.size == 0:
        return None
    dtypes = x.candidates.dtype, x.gate.dtype, x.predecessor.dtype, x.successor.dtype

    def example() -> tuple[PairInputs]:
        V = min(x.predecessor.shape[0], 300)
        ids = (mx.arange(2 * K, dtype=mx.uint32) * 7 % V).astype(dtypes[0]).reshape(1, 2, K)
        shapes = (1, 2, K), (1, 2, R), (V, R), (V, R)
        floats = patterns(shapes, (mx.float32, *dtypes[1:]))
        return (PairInputs(mx.zeros((1,), dtypes[0]), ids, *floats),)

    return Probe((K, R, *dtypes), example)


pair_score = Op(pair_score_kernel, pair_score_ops, pair_probe)
