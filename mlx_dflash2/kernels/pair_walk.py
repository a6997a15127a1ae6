"""Pair scores and the walk through them at once, where nobody needs the scores."""

import mlx.core as mx

from ._common import MAX_K, build, use_kernel
from .pair_score import example_inputs, pair_score_ops
from .path_walk import HEADERS, OUTPUTS, drawing_inputs, output_spec, path_walk_ops

_MAX_THREADS = 512


def pair_walk_ops(
    anchor: mx.array,
    candidates: mx.array,
    unary: mx.array,
    gate: mx.array,
    predecessor: mx.array,
    successor: mx.array,
    temperature: float = 0.0,
    uniforms: mx.array | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """:func:`path_walk_ops` through the scores of :func:`pair_score_ops`.

    Shapes:
      - anchor: [B] token ids
      - candidates: [B, L, K] token ids
      - unary: [B, L, K] float32
      - gate: [B, L, R], the projected hidden row of each position
      - predecessor, successor: [V, R] codebooks A and B
      - uniforms: [B, L] in [0, 1), required above temperature 0
    Returns:
      - tokens: [B, L], the ids along the path, dtype of ``candidates``
      - choices: [B, L] uint32, their indices into the candidates
      - q: [B, L, K] float32, the distribution that each step drew from
    """
    scores = pair_score_ops(anchor, candidates, unary, gate, predecessor, successor)
    return path_walk_ops(scores, candidates, temperature, uniforms)


def pair_walk_kernel(
    anchor: mx.array,
    candidates: mx.array,
    unary: mx.array,
    gate: mx.array,
    predecessor: mx.array,
    successor: mx.array,
    temperature: float = 0.0,
    uniforms: mx.array | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """As :func:`pair_walk_ops`, in one launch that scores only the pairs it meets."""
    B, _, K = candidates.shape
    threads = min(_MAX_THREADS, 32 * K)
    names = ("anchor", "candidates", "unary", "gate", "predecessor", "successor")
    return tuple(
        build("pair_walk", (*names, "temperature", "uniforms"), OUTPUTS, HEADERS)(
            inputs=[
                *(anchor, candidates, unary.astype(mx.float32), gate, predecessor, successor),
                *drawing_inputs(temperature, uniforms),
            ],
            template=[
                ("K", K),
                ("R", gate.shape[-1]),
                ("THREADS", threads),
                ("SAMPLED", temperature > 0),
            ],
            grid=(threads, B, 1),
            threadgroup=(threads, 1, 1),
            **output_spec(candidates),
        )
    )


def pair_walk(
    anchor: mx.array,
    candidates: mx.array,
    unary: mx.array,
    gate: mx.array,
    predecessor: mx.array,
    successor: mx.array,
    temperature: float = 0.0,
    uniforms: mx.array | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """:func:`pair_walk_kernel` where it runs, else :func:`pair_walk_ops`."""
    form = pair_walk_ops
    K = candidates.shape[-1]
    if K <= MAX_K and candidates.size > 0:
        dtypes = candidates.dtype, gate.dtype, predecessor.dtype, successor.dtype

        def example() -> tuple:
            scored = example_inputs(candidates, gate, predecessor, successor)
            return *scored, temperature, mx.array([[0.3, 0.7]])

        specialisation = (K, gate.shape[-1], temperature > 0, *dtypes)
        if use_kernel(pair_walk_kernel, pair_walk_ops, specialisation, example):
            form = pair_walk_kernel
    arrays = anchor, candidates, unary, gate, predecessor, successor
    return form(*arrays, temperature, uniforms)
