"""The K best entries of each row of logits, with a deterministic order."""

import mlx.core as mx

from ._common import MAX_K, build, pattern, scalar, unused, use_kernel

_THREADS = 256
_MAX_PER_THREAD = 32
# Entries that the plain form compares by their largest first.
_GROUP = 64


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
    ids = _best_ids(mx.where(mx.isnan(x), -mx.inf, x), k)
    values = mx.take_along_axis(x, ids, axis=-1)
    order = _stable_descending(values)
    ids = mx.take_along_axis(ids, order, axis=-1)
    values = mx.take_along_axis(values, order, axis=-1) * multiplier
    if softcap:
        values = softcap * mx.tanh(values / softcap)
    return values, ids.astype(mx.uint32)


def _best_ids(x: mx.array, k: int) -> mx.array:
    """Indices of the ``k`` largest, the first of equal ones, in ascending order."""
    size = x.shape[-1]
    groups = -(-size // _GROUP)
    if groups < 2 * k:
        return _select(x, k)
    # The k largest are in the k groups of the largest maxima: little is left to be ordered.
    x = mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, groups * _GROUP - size)], constant_values=-mx.inf)
    x = x.reshape(*x.shape[:-1], groups, _GROUP)
    best = _best_ids(x.max(axis=-1), k)[..., None]
    ids = (best * _GROUP + mx.arange(_GROUP)).flatten(-2)
    kept = mx.take_along_axis(x, best, axis=-2).flatten(-2)
    return mx.take_along_axis(ids, _select(kept, k), axis=-1)


def _select(x: mx.array, k: int) -> mx.array:
    """As :func:`_best_ids`, in one pass over everything."""
    size = x.shape[-1]
    # Every entry above the k-th value is in; entries equal to it enter by lowest id.
    threshold = mx.min(mx.topk(x, k, axis=-1), axis=-1, keepdims=True)
    ids = mx.arange(size, dtype=mx.int32)
    key = mx.where(x > threshold, ids - size, mx.where(x == threshold, ids, size))
    ids = mx.sort(-mx.topk(-key, k, axis=-1), axis=-1)
    return mx.sort(mx.where(ids < 0, ids + size, ids), axis=-1)


def _stable_descending(values: mx.array) -> mx.array:
    """Indices that sort the short last axis descending, equal values in place."""
    k = values.shape[-1]
    this, other = values[..., :, None], values[..., None, :]
    earlier = mx.arange(k)[None, :] < mx.arange(k)[:, None]
    ahead = (other > this) | ((other == this) & earlier)
    return mx.argsort(ahead.astype(mx.int32).sum(axis=-1), axis=-1)


def top_k_kernel(
    logits: mx.array,
    k: int,
    multiplier: float = 1.0,
    softcap: float | None = None,
) -> tuple[mx.array, mx.array]:
    """As :func:`top_k_ops`, in one launch, or two where a row is shared by several threadgroups.

    NaN counts as -infinity. Errors: ``ValueError`` unless 1 <= k <= 64 and k <= V.
    """
    vocab_size = logits.shape[-1]
    if not 1 <= k <= min(vocab_size, MAX_K):
        raise ValueError(f"`k` has to be in [1, {min(vocab_size, MAX_K)}] but is {k}.")
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
    kernel = build(
        "top_k", ("x", "ids", "multiplier", "softcap"), ("values", "winners"), ("order.h",)
    )
    return kernel(
        inputs=[
            x,
            unused(mx.uint32) if ids is None else ids,
            scalar(multiplier),
            scalar(softcap or 1.0),
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


def top_k(
    logits: mx.array,
    k: int,
    multiplier: float = 1.0,
    softcap: float | None = None,
) -> tuple[mx.array, mx.array]:
    """:func:`top_k_kernel` where it runs, else :func:`top_k_ops`."""
    vocab_size = logits.shape[-1]
    form = top_k_ops
    if 1 <= k <= min(vocab_size, MAX_K) and logits.size > 0:
        specialisation = (logits.dtype, vocab_size, k, bool(softcap))

        def example() -> tuple:
            return pattern((1, vocab_size), logits.dtype), k, multiplier, softcap

        if use_kernel(top_k_kernel, top_k_ops, specialisation, example):
            form = top_k_kernel
    return form(logits, k, multiplier, softcap)
