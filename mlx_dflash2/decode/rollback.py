"""Taking rows back out of a target's caches: one strategy for each cache class of mlx-lm.

A pass appends L rows to every cache. Then each sequence keeps the first of its rows, from 0 to L
for one sequence alone and from 1 to L for each of a batch. Caches that can drop their newest rows
are trimmed. A ring that has wrapped is put back and the kept rows are appended again. A recurrent
state's recurrence is run on the kept rows. A batch's caches are right-aligned: what
a sequence rejects is rolled out to the left, where the mask hides it.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)


class Rollback(Protocol):
    """The undo handle of one cache, taken before a pass appends to it."""

    def commit(self, keeps: Sequence[int], record: Any) -> None:
        """Leave the first ``keeps[b]`` of sequence b's rows in the cache."""

    def abort(self) -> None:
        """Put the cache back, however far the pass has come."""


class Trim:
    """Drop the newest rows."""

    def __init__(self, cache: Any, num_rows: int):
        self.cache, self.start = cache, cache.offset

    def commit(self, keeps: Sequence[int], record: Any) -> None:
        surplus = self.cache.offset - self.start - keeps[0]
        if surplus > 0 and self.cache.trim(surplus) != surplus:
            raise RuntimeError(f"{type(self.cache).__name__} did not drop {surplus} rows.")

    def abort(self) -> None:
        self.commit([0], None)


class Restore:
    """Cut the newest rows off a ring that has wrapped: a pass of several leaves it in order."""

    def __init__(self, cache: Any, num_rows: int):
        self.cache, self.num_rows = cache, num_rows
        self.saved = _state(cache)

    def commit(self, keeps: Sequence[int], record: Any) -> None:
        surplus = self.num_rows - keeps[0]
        if keeps[0] == 0:
            self.abort()
        elif surplus > 0:
            keys, values, offset, first, size, index = self.cache.state
            kept = (x[..., :-surplus, :] for x in (keys, values))
            self.cache.state = (*kept, offset - surplus, first, size, index - surplus)

    def abort(self) -> None:
        self.cache.state = tree_map(_handle, self.saved)


class Replay:
    """Put a recurrent state to where its recurrence is after the kept rows."""

    def __init__(self, cache: Any, num_rows: int):
        self.cache, self.num_rows, self.saved = cache, num_rows, list(cache.cache)

    def commit(self, keeps: Sequence[int], record: Any) -> None:
        if max(keeps) == 0:
            self.abort()
        elif record is not None:
            alone = len(keeps) == 1
            self._set(record.replay(keeps[0]) if alone else record.replay_rows(keeps))
        elif min(keeps) < self.num_rows:
            raise RuntimeError("A recurrent cache cannot keep part of an unrecorded pass.")

    def abort(self) -> None:
        self._set(self.saved)

    def _set(self, arrays: Sequence[mx.array | None]) -> None:
        for index, array in enumerate(arrays):
            self.cache[index] = array


class TrimAndRoll:
    """Drop the newest rows that no sequence of a batch keeps; roll out what some reject."""

    def __init__(self, cache: BatchKVCache, num_rows: int):
        self.cache, self.num_rows, self.start = cache, num_rows, cache.size()

    def commit(self, keeps: Sequence[int], record: Any) -> None:
        surplus = [self.num_rows - keep for keep in keeps]
        shared = min(surplus)
        if self.cache.trim(shared) != shared:
            raise RuntimeError(f"BatchKVCache did not drop {shared} rows.")
        if max(surplus) > shared:
            self.cache.prepare(right_padding=[count - shared for count in surplus])
            self.cache.finalize()

    def abort(self) -> None:
        self.cache.trim(self.cache.size() - self.start)


class Roll:
    """Roll a batch's rejected rows out of its rings."""

    def __init__(self, cache: BatchRotatingKVCache, num_rows: int):
        self.cache, self.num_rows = cache, num_rows
        if num_rows > 1:
            _put_in_order(cache)
        self.saved = _state(cache)

    def commit(self, keeps: Sequence[int], record: Any) -> None:
        surplus = [self.num_rows - keep for keep in keeps]
        if any(surplus):
            # What wraps to the front of a full ring is among the rows that the next pass drops.
            self.cache.prepare(lengths=[-count for count in surplus], right_padding=surplus)
            self.cache.finalize()

    def abort(self) -> None:
        self.cache.state = tree_map(_handle, self.saved)


class Each:
    """The undo handles of a list of caches, part by part."""

    def __init__(self, cache: Any, num_rows: int):
        self.parts = [_begin(part, num_rows) for part in cache.caches]

    def commit(self, keeps: Sequence[int], record: Any) -> None:
        for index, part in enumerate(self.parts):
            part.commit(keeps, None if record is None else record[index])

    def abort(self) -> None:
        for part in self.parts:
            part.abort()


def _handle(value: Any) -> Any:
    """The same data under a handle of its own, which slice assignment to the other leaves alone."""
    return value[...] if isinstance(value, mx.array) else value


def _put_in_order(cache: BatchRotatingKVCache) -> None:
    """Order wrapped rings by time, as a pass of several rows does, but before its mask is made.

    mlx-lm's mask of several rows takes the ring's index for the number of its rows.
    """
    keys, values, offset, left_padding, size, count, index, rotated = cache.state
    if rotated:
        keys, values = (mx.roll(x, -index, 2) for x in (keys, values))
        cache.state = (keys, values, offset, left_padding, size, count, keys.shape[2], False)


def _rotating(cache: RotatingKVCache, num_rows: int) -> Rollback:
    wraps = cache.offset + num_rows > cache.max_size
    return Restore(cache, num_rows) if wraps else Trim(cache, num_rows)


# Caches of one sequence, and those that only a batch has.
_ALONE: dict[type, Callable[[Any, int], Rollback]] = {
    KVCache: Trim,
    QuantizedKVCache: Trim,
    RotatingKVCache: _rotating,
    ArraysCache: Replay,
    CacheList: Each,
}
_STRATEGIES = _ALONE | {BatchKVCache: TrimAndRoll, BatchRotatingKVCache: Roll}


def _begin(cache: Any, num_rows: int) -> Rollback:
    return _STRATEGIES[type(cache)](cache, num_rows)


def check_caches(prompt_cache: Sequence[Any], fresh: Sequence[Any]) -> None:
    """Refuse caches that are not the target's, or that rows cannot be taken out of exactly.

    Args:
        prompt_cache (sequence): The caches to decode with.
        fresh (sequence): Caches that the target makes itself.

    Raises:
        ValueError: naming what was found and what is supported.
    """
    if len(prompt_cache) == 0:
        raise ValueError("The prompt cache is empty, as after an interruption: make a new one.")
    if len(prompt_cache) != len(fresh):
        raise ValueError(
            f"The prompt cache has {len(prompt_cache)} caches but the target has {len(fresh)}."
        )
    for index, (cache, own) in enumerate(zip(prompt_cache, fresh, strict=True)):
        if type(cache) not in _ALONE:
            known = ", ".join(kind.__name__ for kind in _ALONE)
            raise ValueError(
                f"The target's cache {type(cache).__name__} cannot be rolled back; supported are "
                f"{known}."
            )
        if _layout(cache) != _layout(own):
            raise ValueError(
                f"Cache {index} of the prompt cache is {type(cache).__name__} but the target's is "
                f"{type(own).__name__}."
            )
        if isinstance(cache, CacheList):
            check_caches(cache.caches, own.caches)


def _layout(cache: Any) -> type:
    """Caches of keys and values, quantized or rotating or neither, stand for one another."""
    return type(cache) if isinstance(cache, ArraysCache | CacheList) else KVCache


class Transaction:
    """One pass over all caches: begin it, run the pass, then commit or abort.

    Args:
        layers (list): The target's caches, of one sequence or of a batch.
        num_rows (int): The rows that the pass will append.
    """

    def __init__(self, layers: list[Any], num_rows: int):
        self.layers = layers
        self.parts = [_begin(cache, num_rows) for cache in layers]

    def commit(self, keeps: Sequence[int], records: Sequence[Any]) -> None:
        """Keep the first ``keeps[b]`` rows of sequence b; ``records`` are the pass's, by layer."""
        for part, record in zip(self.parts, records, strict=True):
            part.commit(keeps, record)

    def abort(self) -> None:
        """Put every cache back to where it was at the beginning."""
        for part in self.parts:
            part.abort()


class Checkpoint:
    """A place that caches can go back to although rows cannot be taken out of all of them.

    Attributes:
        length (int): Tokens covered there.
    """

    def __init__(self, prompt_cache: Sequence[Any]):
        self.length = num_cached(prompt_cache)
        self.states = [None if drops_rows(cache) else _state(cache) for cache in prompt_cache]
        # Another thread may come back here.
        mx.eval([x for x in dict(tree_flatten(self.states)).values() if isinstance(x, mx.array)])

    def fits(self, prompt_cache: Sequence[Any]) -> bool:
        """Whether the caches can go back: all that are unsaved here can still drop rows."""
        pairs = zip(prompt_cache, self.states, strict=False)
        return len(self.states) == len(prompt_cache) and all(
            state is not None or drops_rows(cache) for cache, state in pairs
        )

    def restore(self, prompt_cache: Sequence[Any]) -> None:
        """Take the caches back to this place."""
        for cache, state in zip(prompt_cache, self.states, strict=True):
            if state is None:
                cache.trim(cache.offset - self.length)
            else:
                cache.state = tree_map(_handle, state)


def drops_rows(cache: Any) -> bool:
    """Whether a cache can drop its newest rows now and for as long as it lives."""
    return isinstance(cache, KVCache | QuantizedKVCache)


def _state(cache: Any) -> Any:
    return tree_map(_handle, cache.state)


def num_cached(prompt_cache: Sequence[Any]) -> int:
    """Tokens that the caches cover, by their own count."""
    counts = [0]
    for cache in prompt_cache:
        inner = num_cached(cache.caches) if isinstance(cache, CacheList) else 0
        counts.append(max(inner, getattr(cache, "offset", 0)))
    return max(counts)


def rows_at_once(prompt_cache: Sequence[Any]) -> float:
    """How many rows one pass may append and still see what single steps would see.

    A ring that keeps its first rows (``max_kv_size``) shows several rows a wrong window once it
    has wrapped, so it takes as many as fit, and then one.
    """
    rows = float("inf")
    for cache in prompt_cache:
        if isinstance(cache, CacheList):
            rows = min(rows, rows_at_once(cache.caches))
        elif isinstance(cache, RotatingKVCache) and cache.keep > 0:
            rows = min(rows, max(1, cache.max_size - cache.offset))
    return rows
