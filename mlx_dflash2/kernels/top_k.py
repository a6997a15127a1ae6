"""The K best entries of each row of logits, with a deterministic order."""

import mlx.core as mx

from ._common import LIBRARY, MAX_K, Op, Probe, pattern, placeholder

_THREADS = 256
_MAX_PER_THREAD = 32
# Entries that the plain form compares by their largest first.
_GROUP = 64


def transform_logits(
    x: mx.array, multiplier: float = 1.0, softcap: float | None = None
) -> mx.array:
    """Compute ``softcap * tanh(multiplier * x / softcap)`` in float32; no cap for ``None``."""
    x = x.astype(mx.float32) * multiplier
    return softcap * mx.tanh(x / softcap) if softcap else x


def top_k_ops(
    logits: mx.array, k: int, multiplier: float = 1.0, softcap: float | None = None
) -> tuple[mx.array, mx.array]:
    """Find the ``k`` largest logits of each row, value descending and then id ascending.

    The selection is made on the raw logits; only the ``k`` chosen values are transformed, so that
    :func:`transform_logits` can neither create nor break a tie.

    Args:
        logits (mx.array): [..., V], any float dtype.
        k (int): From 1 to V.
        multiplier (float): Default: ``1.0``.
        softcap (float, optional): Default: ``None``, no cap.

    Returns:
        tuple of mx.array: The transformed values [..., k] float32, and the ids [..., k] uint32.

    Raises:
        ValueError: if ``k`` is out of range.
    """
    _check_k(k, logits.shape[-1])
    x = logits.astype(mx.float32)
    ids = _best_ids(mx.where(mx.isnan(x), -mx.inf, x), k)
    values = mx.take_along_axis(x, ids, axis=-1)
    order = _stable_descending(values)
    ids = mx.take_along_axis(ids, order, axis=-1)
    values = mx.take_along_axis(values, order, axis=-1)
    return transform_logits(values, multiplier, softcap), ids.astype(mx.uint32)


def _check_k(k: int, most: int) -> None:
    if not 1 <= k <= most:
        raise ValueError(f"`k` has to be an integer in [1, {most}] but is {k}.")


def _best_ids(x: mx.array, k: int) -> mx.array:
    """Find the ``k`` largest, the first of equal ones; indices in ascending order."""
    size = x.shape[-1]
    groups = -(-size // _GROUP)
    if groups < 2 * k:
        return _select(x, k)
    # The k largest are in the k groups with the largest maxima: little is left to order.
    x = mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, groups * _GROUP - size)], constant_values=-mx.inf)
    x = x.reshape(*x.shape[:-1], groups, _GROUP)
    best = _best_ids(x.max(axis=-1), k)[..., None]
    ids = (best * _GROUP + mx.arange(_GROUP)).flatten(-2)
    kept = mx.take_along_axis(x, best, axis=-2).flatten(-2)
    return mx.take_along_axis(ids, _select(kept, k), axis=-1)


def _select(x: mx.array, k: int) -> mx.array:
    """Do :func:`_best_ids` in one pass over everything."""
    size = x.shape[-1]
    # Every entry above the k-th value is in; entries equal to it enter by lowest id.
    threshold = mx.min(mx.topk(x, k, axis=-1), axis=-1, keepdims=True)
    ids = mx.arange(size, dtype=mx.int32)
    key = mx.where(x > threshold, ids - size, mx.where(x == threshold, ids, size))
    ids = mx.sort(-mx.topk(-key, k, axis=-1), axis=-1)
    return mx.sort(mx.where(ids < 0, ids + size, ids), axis=-1)


def _stable_descending(values: mx.array) -> mx.array:
    """Find the order that sorts the short last axis descending, equal values in place."""
    k = values.shape[-1]
    this, other = values[..., :, None], values[..., None, :]
    earlier = mx.arange(k)[None, :] < mx.arange(k)[:, None]
    ahead = (other > this) | ((other == this) & earlier)
    return mx.argsort(ahead.astype(mx.int32).sum(axis=-1), axis=-1)


def top_k_kernel(
    logits: mx.array, k: int, multiplier: float = 1.0, softcap: float | None = None
) -> tuple[mx.array, mx.array]:
    """Compute :func:`top_k_ops` in one launch, or in two where threadgroups share a row.

    NaN counts as -infinity; ``k`` is at most 64.
    """
    vocab_size = logits.shape[-1]
    _check_k(k, min(vocab_size, MAX_K))
    x = logits.reshape(-1, vocab_size)
    shards = -(-vocab_size // (_THREADS * _MAX_PER_THREAD))
    values, ids = _launch(x, None, shards, k, multiplier, softcap, last=shards == 1)
    if shards > 1:
        rows = values.reshape(-1, shards * k), ids.reshape(-1, shards * k)
        values, ids = _launch(*rows, 1, k, multiplier, softcap, last=True)
    shape = (*logits.shape[:-1], k)
    return values.reshape(shape), ids.reshape(shape)


def _launch(
    x: mx.array,
    ids: mx.array | None,
    shards: int,
    k: int,
    multiplier: float,
    softcap: float | None,
    last: bool,
) -> list[mx.array]:
    rows, size = x.shape
    names = ("x", "ids", "multiplier", "softcap")
    return LIBRARY.kernel("top_k", names, ("values", "winners"), ("order.h",))(
        inputs=[
            x,
            placeholder(mx.uint32) if ids is None else ids,
            float(multiplier),
            float(softcap or 1.0),
        ],
        template=[
            ("T", x.dtype),
            ("K", k),
            ("THREADS", _THREADS),
            ("PER", -(-size // (shards * _THREADS))),
            ("MERGE", ids is not None),
            ("LAST", last),
            ("CAPPED", bool(softcap)),
        ],
        grid=(_THREADS * shards, rows, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(rows, shards, k)] * 2,
        output_dtypes=[mx.float32, mx.uint32],
    )


def _probe(
    logits: mx.array, k: int, multiplier: float = 1.0, softcap: float | None = None
) -> Probe | None:
    V, dtype = logits.shape[-1], logits.dtype
    if not 1 <= k <= min(V, MAX_K) or logits.size == 0:
        return None
    return Probe(
        (dtype, V, k, bool(softcap)), lambda: (pattern((1, V), dtype), k, multiplier, softcap)
    )


top_k = Op(top_k_kernel, top_k_ops, _probe)
