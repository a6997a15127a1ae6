"""A short causal depthwise convolution whose kernel is partly predicted from the content."""

import mlx.core as mx

from ._common import build, pattern, use_kernel

_THREADS = 256


def grouped_conv_ops(
    x: mx.array, base: mx.array, dynamic: mx.array, residual: mx.array | None = None
) -> mx.array:
    """out[l, c] = sum over taps o <= l of (base[o, c] + dynamic[l, o, c // g]) * x[l - o, c].

    Each row of the batch is one block: nothing is read from before its first position. The sum,
    with the residual if there is one, is float32 and is rounded once, to the dtype of the residual
    or else of ``x``.

    Shapes:
      - x: [B, L, H]
      - base: [K, H], one weight a tap and channel
      - dynamic: [B, L, K, G], one weight a position, tap and group of g = H / G channels
      - residual: [B, L, H]
    Returns:
      - out: [B, L, H]
    """
    B, L, H = x.shape
    K, G = dynamic.shape[-2:]
    groups = x.astype(mx.float32).reshape(B, L, G, H // G)
    base = base.astype(mx.float32).reshape(K, G, H // G)
    dynamic = dynamic.astype(mx.float32)[..., None]
    out = (base[0] + dynamic[:, :, 0]) * groups
    for tap in range(1, min(K, L)):
        delayed = mx.pad(groups[:, :-tap], [(0, 0), (tap, 0), (0, 0), (0, 0)])
        out = out + (base[tap] + dynamic[:, :, tap]) * delayed
    out = out.reshape(B, L, H)
    if residual is None:
        return out.astype(x.dtype)
    return (residual.astype(mx.float32) + out).astype(residual.dtype)


def grouped_conv_kernel(
    x: mx.array, base: mx.array, dynamic: mx.array, residual: mx.array | None = None
) -> mx.array:
    """As :func:`grouped_conv_ops`, in one launch; the inputs may have any strides."""
    B, L, H = x.shape
    K, G = dynamic.shape[-2:]
    added = x if residual is None else residual
    names = ("x", "base", "dynamic", "residual")
    return build("grouped_conv", names, ("out",), row_contiguous=False)(
        inputs=[x, base, dynamic, added],
        template=[("O", added.dtype), ("K", K), ("G", G), ("ADD", residual is not None)],
        grid=(H, L, B),
        threadgroup=(min(H, _THREADS), 1, 1),
        output_shapes=[(B, L, H)],
        output_dtypes=[added.dtype],
    )[0]


def grouped_conv(
    x: mx.array, base: mx.array, dynamic: mx.array, residual: mx.array | None = None
) -> mx.array:
    """:func:`grouped_conv_kernel` where it runs, else :func:`grouped_conv_ops`."""
    H = x.shape[-1]
    K, G = dynamic.shape[-2:]
    stream = None if residual is None else residual.dtype
    specialisation = (K, G, H % G, x.dtype, base.dtype, dynamic.dtype, stream)

    def example() -> tuple:
        added = () if stream is None else (pattern((1, 3, 2 * G), stream, salt=4),)
        return (
            pattern((1, 3, 2 * G), x.dtype),
            pattern((K, 2 * G), base.dtype, salt=2),
            pattern((1, 3, K, G), dynamic.dtype, salt=3),
            *added,
        )

    runs = x.size > 0 and use_kernel(grouped_conv_kernel, grouped_conv_ops, specialisation, example)
    return (grouped_conv_kernel if runs else grouped_conv_ops)(x, base, dynamic, residual)
