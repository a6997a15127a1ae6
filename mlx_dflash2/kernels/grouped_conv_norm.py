"""The end of one sublayer and the start of the next: convolution, residual, RMSNorm."""

from typing import NamedTuple

import mlx.core as mx

from ._common import LIBRARY, Op, Probe, patterns
from .grouped_conv import convolve

_THREADS = 512


class ConvInputs(NamedTuple):
    """A sublayer's output and what ends the sublayer.

    Attributes:
        x (mx.array): The output, [B, L, H].
        base (mx.array): One weight for each tap and channel, [K, H].
        dynamic (mx.array): One weight for each position, tap and group, [B, L, K, G].
        residual (mx.array): What the sublayer adds to, [B, L, H].
        weight (mx.array): Of the RMSNorm, [H].
    """

    x: mx.array
    base: mx.array
    dynamic: mx.array
    residual: mx.array
    weight: mx.array


def grouped_conv_norm_ops(inputs: ConvInputs, eps: float) -> tuple[mx.array, mx.array]:
    """Add :func:`grouped_conv` of a sublayer's output to the residual, and norm the sum.

    The next sublayer reads the normed positions, both itself and to predict its convolutions, so
    they are written here, where the sum is at hand.

    Args:
        inputs (ConvInputs): A block for each row of the batch.
        eps (float): Of the RMSNorm.

    Returns:
        tuple of mx.array: The sum [B, L, H], dtype of the residual, and its norm [B, L, H], dtype
        of ``x``.
    """
    x, base, dynamic, residual, weight = inputs
    total = (residual.astype(mx.float32) + convolve(x, base, dynamic)).astype(residual.dtype)
    normed = mx.fast.rms_norm(total.astype(mx.float32), weight.astype(mx.float32), eps)
    return total, normed.astype(x.dtype)


def grouped_conv_norm_kernel(inputs: ConvInputs, eps: float) -> tuple[mx.array, mx.array]:
    """Compute :func:`grouped_conv_norm_ops` in one launch; the inputs may have any strides."""
    x, residual = inputs.x, inputs.residual
    B, L, H = x.shape
    K, G = inputs.dynamic.shape[-2:]
    threads = min(_THREADS, -(-H // 32) * 32)
    names = (*ConvInputs._fields, "eps")
    total, normed = LIBRARY.kernel(
        "grouped_conv_norm", names, ("total", "normed"), row_contiguous=False
    )(
        inputs=[*inputs, float(eps)],
        template=[
            ("S", residual.dtype),
            ("O", x.dtype),
            ("K", K),
            ("G", G),
            ("H", H),
            ("THREADS", threads),
        ],
        grid=(threads, L, B),
        threadgroup=(threads, 1, 1),
        output_shapes=[(B, L, H)] * 2,
        output_dtypes=[residual.dtype, x.dtype],
    )
    return total, normed


def _probe(inputs: ConvInputs, eps: float) -> Probe | None:
    if inputs.x.size == 0:
        return None
    H, (K, G) = inputs.x.shape[-1], inputs.dynamic.shape[-2:]
    shapes = (1, 3, H), (K, H), (1, 3, K, G), (1, 3, H), (H,)
    dtypes = [x.dtype for x in inputs]
    return Probe((H, K, G, *dtypes), lambda: (ConvInputs(*patterns(shapes, dtypes)), eps))


grouped_conv_norm = Op(grouped_conv_norm_kernel, grouped_conv_norm_ops, _probe)
