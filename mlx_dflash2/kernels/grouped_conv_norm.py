"""The end of one sublayer and the beginning of the next: convolution, residual, RMSNorm."""

import mlx.core as mx

from ._common import build, pattern, scalar, use_kernel
from .grouped_conv import grouped_conv_ops

_THREADS = 512


def grouped_conv_norm_ops(
    x: mx.array,
    base: mx.array,
    dynamic: mx.array,
    residual: mx.array,
    weight: mx.array,
    eps: float,
) -> tuple[mx.array, mx.array]:
    """:func:`grouped_conv` of a sublayer's output, added to the residual, and that sum's RMSNorm.

    The next sublayer reads the normed rows, both itself and to predict its convolutions, so they
    are written here, where the sum is at hand.

    Shapes:
      - x: [B, L, H]
      - base: [K, H], one weight a tap and channel
      - dynamic: [B, L, K, G], one weight a position, tap and group
      - residual: [B, L, H]
      - weight: [H], of the RMSNorm
    Returns:
      - total: [B, L, H], dtype of ``residual``
      - normed: [B, L, H], dtype of ``x``
    """
    total = grouped_conv_ops(x, base, dynamic, residual)
    normed = mx.fast.rms_norm(total.astype(mx.float32), weight.astype(mx.float32), eps)
    return total, normed.astype(x.dtype)


def grouped_conv_norm_kernel(
    x: mx.array,
    base: mx.array,
    dynamic: mx.array,
    residual: mx.array,
    weight: mx.array,
    eps: float,
) -> tuple[mx.array, mx.array]:
    """As :func:`grouped_conv_norm_ops`, in one launch; the inputs may have any strides."""
    B, L, H = x.shape
    K, G = dynamic.shape[-2:]
    threads = min(_THREADS, -(-H // 32) * 32)
    names = ("x", "base", "dynamic", "residual", "weight", "eps")
    return tuple(
        build("grouped_conv_norm", names, ("total", "normed"), row_contiguous=False)(
            inputs=[x, base, dynamic, residual, weight, scalar(eps)],
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
    )


def grouped_conv_norm(
    x: mx.array,
    base: mx.array,
    dynamic: mx.array,
    residual: mx.array,
    weight: mx.array,
    eps: float,
) -> tuple[mx.array, mx.array]:
    """:func:`grouped_conv_norm_kernel` where it runs, else :func:`grouped_conv_norm_ops`."""
    H = x.shape[-1]
    K, G = dynamic.shape[-2:]
    dtypes = x.dtype, base.dtype, dynamic.dtype, residual.dtype, weight.dtype

    def example() -> tuple:
        return (
            pattern((1, 3, H), x.dtype),
            pattern((K, H), base.dtype, salt=2),
            pattern((1, 3, K, G), dynamic.dtype, salt=3),
            pattern((1, 3, H), residual.dtype, salt=4),
            pattern((H,), weight.dtype, salt=5),
            eps,
        )

    kernel, ops = grouped_conv_norm_kernel, grouped_conv_norm_ops
    runs = x.size > 0 and use_kernel(kernel, ops, (H, K, G, *dtypes), example)
    return (kernel if runs else ops)(x, base, dynamic, residual, weight, eps)
