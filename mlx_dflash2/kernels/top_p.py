"""Nucleus sampling's filter of rows of log probabilities, without sorting the vocabulary."""

import mlx.core as mx
from mlx_lm.sample_utils import apply_top_p

from ._common import LIBRARY, Op, Probe, pattern

_THREADS = 1024


def top_p_ops(logprobs: mx.array, p: float) -> mx.array:
    """Keep the most probable tokens that together have a probability of ``p``, as mlx-lm does.

    Args:
        logprobs (mx.array): Rows [R, V].
        p (float): Above 0 and below 1.

    Returns:
        mx.array: [R, V], -infinity for the others; dtype of ``logprobs``.
    """
    return apply_top_p(logprobs, p)


def top_p_kernel(logprobs: mx.array, p: float) -> mx.array:
    """Compute :func:`top_p_ops` in one launch that reads the rows nine times."""
    return LIBRARY.kernel("top_p", ("x", "p"), ("y",), ("ordered_key.h",))(
        inputs=[logprobs, mx.array([p], mx.float32)],
        template=[("T", logprobs.dtype), ("THREADS", _THREADS)],
        grid=(_THREADS, logprobs.shape[0], 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[logprobs.shape],
        output_dtypes=[logprobs.dtype],
    )[0]


def _probe(logprobs: mx.array, p: float) -> Probe | None:
    if logprobs.size == 0:
        return None

    def example() -> tuple:
        x = mx.log(mx.softmax(pattern((2, 7)) * 8, axis=-1))
        return x.astype(logprobs.dtype), 0.7

    return Probe((logprobs.dtype,), example)


top_p = Op(top_p_kernel, top_p_ops, _probe)
