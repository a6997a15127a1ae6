"""A short causal depthwise convolution whose kernel is partly predicted from the content."""

import mlx.core as mx

from ._common import LIBRARY, Op, Probe, patterns

_THREADS = 256


def convolve(x: mx.array, base: mx.array, dynamic: mx.array) -> mx.array:
    """Compute :func:`grouped_conv_ops` in float32, before it is rounded."""
    B, L, H = x.shape
    K, G = dynamic.shape[-2:]
    groups = x.astype(mx.float32).reshape(B, L, G, H // G)
    base = base.astype(mx.float32).reshape(K, G, H // G)
    dynamic = dynamic.astype(mx.float32)[..., None]
    out = (base[0] + dynamic[:, :, 0]) * groups
    for tap in range(1, min(K, L)):
        delayed = mx.pad(groups[:, :-tap], [(0, 0), (tap, 0), (0, 0), (0, 0)])
        out = out + (base[tap] + dynamic[:, :, tap]) * delayed
    return out.reshape(B, L, H)


def grouped_conv_ops(x: mx.array, base: mx.array, dynamic: mx.array) -> mx.array:
    """Sum (base[o, c] + dynamic[l, o, c // g]) * x[l - o, c] over the taps o <= l.

    Each row of the batch is one block: nothing is read from before its first position. The sum is
    float32 and is rounded once.

    Args:
        x (mx.array): [B, L, H].
        base (mx.array): One weight for each tap and channel, [K, H].
        dynamic (mx.array): One weight for each position, tap and group of g = H / G channels,
            [B, L, K, G].

    Returns:
        mx.array: [B, L, H], dtype of ``x``.
    """
    return convolve(x, base, dynamic).astype(x.dtype)


def grouped_conv_kernel(x: mx.array, base: mx.array, dynamic: mx.array) -> mx.array:
    """Compute :func:`grouped_conv_ops` in one launch; the inputs may have any strides."""
    B, L, H = x.shape
    K, G = dynamic.shape[-2:]
    names = ("x", "base", "dynamic")
    return LIBRARY.kernel("grouped_conv", names, ("out",), row_contiguous=False)(
        inputs=[x, base, dynamic],
        template=[("O", x.dtype), ("K", K), ("G", G)],
        grid=(H, L, B),
        threadgroup=(min(H, _THREADS), 1, 1),
        output_shapes=[(B, L, H)],
        output_dtypes=[x.dtype],
    )[0]


def _probe(x: mx.array, base: mx.array, dynamic: mx.array) -> Probe | None:
    if x.size == 0:
        return None
    K, G = dynamic.shape[-2:]
    shapes = (1, 3, 2 * G), (K, 2 * G), (1, 3, K, G)
    dtypes = x.dtype, base.dtype, dynamic.dtype
    return Probe((K, G, *dtypes), lambda: patterns(shapes, dtypes))


grouped_conv = Op(grouped_conv_kernel, grouped_conv_ops, _probe)
