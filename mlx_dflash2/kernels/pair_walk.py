"""Pair scores and the walk through them at once, where nobody needs the scores."""

import mlx.core as mx

from ._common import LIBRARY, Op, Probe
from .pair_score import PairInputs, pair_probe, pair_score_ops
from .path_walk import HEADERS, Walk, drawing_inputs, output_spec, path_walk_ops

_MAX_THREADS = 512


def pair_walk_ops(
    x: PairInputs, temperature: float = 0.0, uniforms: mx.array | None = None
) -> Walk:
    """Follow the scores of :func:`pair_score_ops` as :func:`path_walk_ops` does.

    To be used for drafting.

    Args:
        x (PairInputs): A block for each row of the batch.
        temperature (float): Default: ``0.0``.
        uniforms (mx.array, optional): [B, L] in [0, 1), required above temperature 0.
    """
    return path_walk_ops(pair_score_ops(x), x.candidates, temperature, uniforms)


def pair_walk_kernel(
    x: PairInputs, temperature: float = 0.0, uniforms: mx.array | None = None
) -> Walk:
    """Compute :func:`pair_walk_ops` in one launch that scores only the pairs it meets."""
    B, _, K = x.candidates.shape
    threads = min(_MAX_THREADS, 32 * K)
    names = (*PairInputs._fields, "temperature", "uniforms")
    inputs = x._replace(unary=x.unary.astype(mx.float32))
    outputs = LIBRARY.kernel("pair_walk", names, Walk._fields, HEADERS)(
        inputs=[*inputs, *drawing_inputs(temperature, uniforms)],
        template=[
            ("K", K),
            ("R", x.gate.shape[-1]),
            ("THREADS", threads),
            ("SAMPLED", temperature > 0),
        ],
        grid=(threads, B, 1),
        threadgroup=(threads, 1, 1),
        **output_spec(x.candidates),
    )
    return Walk(*outputs)


def _probe(
    x: PairInputs, temperature: float = 0.0, uniforms: mx.array | None = None
) -> Probe | None:
    pairs = pair_probe(x)
    if pairs is None:
        return None

    def example() -> tuple:
        return *pairs.example(), temperature, mx.array([[0.3, 0.7]])

    return Probe((*pairs.specialization, temperature > 0), example)


pair_walk = Op(pair_walk_kernel, pair_walk_ops, _probe)
