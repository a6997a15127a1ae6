"""Taking rows back out of a target's caches: one strategy for each cache class of mlx-lm.

A pass appends L rows to every cache; then the first ``keep`` of them stay, for any keep from 0 to
L. Caches that can drop their newest rows are trimmed. A ring that has wrapped is put back and the
kept rows are appended again. A recurrent state is put back and its recurrence run on the kept rows.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)


class Rollback(Protocol):
    """A cache's way back, made just before a pass appends to it."""

    def commit(self, keep: int, record: Any):
        """Leave the first ``keep`` of the pass's rows in the cache."""

    def abort(self):
        """Put the cache back, however far the pass has come."""


class Trim:
    """Drop the newest rows."""

    def __init__(self, cache: Any, num_rows: int):
        self.cache, self.start = cache, cache.offset

    def commit(self, keep: int, record: Any):
        surplus = self.cache.offset - self.start - keep
        if surplus > 0 and self.cache.trim(surplus) != surplus:
            raise RuntimeError(f"{type(self.cache).__name__} did not drop {surplus} rows.")

    def abort(self):
        self.commit(0, None)


class Restore:
    """Put the saved state back and append the kept rows again: exact where a ring has wrapped."""

    def __init__(self, cache: Any, num_rows: int):
        self.cache, self.num_rows = cache, num_rows
        self.saved = _state(cache)

    def commit(self, keep: int, record: Any):
        if keep == self.num_rows:
            return
        rows = [x[..., -self.num_rows :, :] for x in (self.cache.keys, self.cache.values)]
        self.abort()
        if keep > 0:
            self.cache.update_and_fetch(*(x[..., :keep, :] for x in rows))

    def abort(self):
        self.cache.state = tree_map(_handle, self.saved)


class Replay:
    """Put a recurrent state to where its recurrence is after the kept rows."""

    def __init__(self, cache: Any, num_rows: int):
        self.cache, self.num_rows, self.saved = cache, num_rows, list(cache.cache)

    def commit(self, keep: int, record: Any):
        if keep == 0:
            self.abort()
        elif keep < self.num_rows:
            if record is None:
                raise RuntimeError("A recurrent cache cannot keep part of an unrecorded pass.")
            self._set(record.replay(keep))

    def abort(self):
        self._set(self.saved)

    def _set(self, arrays: Sequence[mx.array | None]):
        for index, array in enumerate(arrays):
            self.cache[index] = array


class Each:
    """A list of caches, each its own way."""

    def __init__(self, cache: Any, num_rows: int):
        self.parts = [_begin(part, num_rows) for part in cache.caches]

    def commit(self, keep: int, record: Any):
        for index, part in enumerate(self.parts):
            part.commit(keep, None if record is None else record[index])

    def abort(self):
        for part in self.parts:
            part.abort()


def _handle(value: Any) -> Any:
    """The same data under a handle of its own, which slice assignment to the other leaves alone."""
    return value[...] if isinstance(value, mx.array) else value


def _rotating(cache: RotatingKVCache, num_rows: int) -> Rollback:
    wraps = cache.offset + num_rows > cache.max_size
    return Restore(cache, num_rows) if wraps else Trim(cache, num_rows)


_STRATEGIES = {
    KVCache: Trim,
    QuantizedKVCache: Trim,
    RotatingKVCache: _rotating,
    ArraysCache: Replay,
    CacheList: Each,
}


def _begin(cache: Any, num_rows: int) -> Rollback:
    return _STRATEGIES[type(cache)](cache, num_rows)


def check_caches(prompt_cache: Sequence[Any], fresh: Sequence[Any]):
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
        if type(cache) not in _STRATEGIES:
            known = ", ".join(kind.__name__ for kind in _STRATEGIES)
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
    """Caches of keys and values, quantised or rotating or neither, stand for one another."""
    return type(cache) if isinstance(cache, ArraysCache | CacheList) else KVCache


class Transaction:
    """One pass over all caches: begin it, run the pass, then commit or abort.

    Args:
        prompt_cache (list): The target's caches.
        num_rows (int): The rows that the pass will append.
    """

    def __init__(self, prompt_cache: Sequence[Any], num_rows: int):
        self.parts = [_begin(cache, num_rows) for cache in prompt_cache]

    def commit(self, keep: int, records: Sequence[Any]):
        """Keep the first ``keep`` rows; ``records`` are the pass's, one a cache."""
        for part, record in zip(self.parts, records, strict=True):
            part.commit(keep, record)

    def abort(self):
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
        mx.eval([value for _, value in tree_flatten(self.states) if isinstance(value, mx.array)])

    def fits(self, prompt_cache: Sequence[Any]) -> bool:
        """Whether the caches can go back: all that are unsaved here can still drop rows."""
        pairs = zip(prompt_cache, self.states, strict=False)
        return len(self.states) == len(prompt_cache) and all(
            state is not None or drops_rows(cache) for cache, state in pairs
        )

    def restore(self, prompt_cache: Sequence[Any]):
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
