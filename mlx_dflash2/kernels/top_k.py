"""The K best entries of each row of logits, with a deterministic order."""

import mlx.core as mx


def top_k_ops(
    logits: mx.array,
    k: int,
    multiplier: float = 1.0,
    softcap: float | None = None,
) -> tuple[mx.array, mx.array]:
    """The ``k`` largest logits of each row, value descending and then id ascending.

    The selection is made on the raw logits; only the ``k`` chosen values are multiplied and
    soft-capped, in float32, so that the transform can neither create nor break a tie.

    Shapes:
      - logits: [..., V], any float dtype
    Returns:
      - values: [..., k] float32, ``softcap * tanh(multiplier * x / softcap)``
      - ids: [..., k] uint32
    """
    vocab_size = logits.shape[-1]
    if not 1 <= k <= vocab_size:
        raise ValueError(f"`k` has to be an integer in [1, {vocab_size}] but is {k}.")
    x = logits.astype(mx.float32)
    # Every entry above the k-th value is in; entries equal to it enter by lowest id.
    threshold = mx.min(mx.topk(x, k, axis=-1), axis=-1, keepdims=True)
    ids = mx.arange(vocab_size, dtype=mx.int32)
    key = mx.where(x > threshold, ids - vocab_size, mx.where(x == threshold, ids, vocab_size))
    ids = mx.sort(-mx.topk(-key, k, axis=-1), axis=-1)
    ids = mx.where(ids < 0, ids + vocab_size, ids)
    # A row of NaN has no order: keep its ids in range and let the values tell.
    ids = mx.sort(mx.minimum(ids, vocab_size - 1), axis=-1)
    values = mx.take_along_axis(x, ids, axis=-1)
    order = _stable_descending(values)
    ids = mx.take_along_axis(ids, order, axis=-1)
    values = mx.take_along_axis(values, order, axis=-1) * multiplier
    if softcap:
        values = softcap * mx.tanh(values / softcap)
    return values, ids.astype(mx.uint32)


def _stable_descending(values: mx.array) -> mx.array:
    """Indices that sort the short last axis descending, equal values in place."""
    k = values.shape[-1]
    this, other = values[..., :, None], values[..., None, :]
    earlier = mx.arange(k)[None, :] < mx.arange(k)[:, None]
    ahead = (other > this) | ((other == this) & earlier)
    return mx.argsort(ahead.astype(mx.int32).sum(axis=-1), axis=-1)


top_k = top_k_ops
