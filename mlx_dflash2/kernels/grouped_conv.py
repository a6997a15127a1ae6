"""A short causal depthwise convolution whose kernel is partly predicted from the content."""

import mlx.core as mx


def grouped_conv_ops(x: mx.array, base: mx.array, dynamic: mx.array) -> mx.array:
    """out[l, c] = sum over taps o <= l of (base[o, c] + dynamic[l, o, c // g]) * x[l - o, c].

    Each row of the batch is one block: nothing is read from before its first position. The sum
    is float32 and is rounded once, to the dtype of ``x``.

    Shapes:
      - x: [B, L, H]
      - base: [K, H], one weight a tap and channel
      - dynamic: [B, L, K, G], one weight a position, tap and group of g = H / G channels
    Returns:
      - out: [B, L, H], dtype of ``x``
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
    return out.reshape(B, L, H).astype(x.dtype)


grouped_conv = grouped_conv_ops
