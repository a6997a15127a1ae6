"""The target's caches of a whole batch: sequences join and leave."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    CacheList,
    KVCache,
    RotatingKVCache,
)
from mlx_lm.models.rope_utils import DynamicNTKScalingRoPE

# What each row's own cache may be before it joins.
_SINGLE = (KVCache, RotatingKVCache, ArraysCache, CacheList)


def check_batchable(prompt_caches: Sequence[Sequence[Any]]) -> None:
    """Refuse caches that mlx-lm cannot put into one batch exactly.

    Raises:
        ValueError: naming the class and those that are supported.
    """
    layouts = [[_kind(cache) for cache in caches] for caches in prompt_caches]
    for index, layout in enumerate(layouts):
        if layout != layouts[0]:
            raise ValueError(
                f"The caches of prompt {index} are {layout} but those of prompt 0 are {layouts[0]}."
            )


def check_rotation(model: nn.Module) -> None:
    """Refuse a target whose rotation depends on how long a sequence is.

    Raises:
        ValueError: naming the module.
    """
    for path, module in model.named_modules():
        if isinstance(module, DynamicNTKScalingRoPE):
            raise ValueError(
                f"The target's {path} is a DynamicNTKScalingRoPE, which mlx-lm does not batch."
            )


def _kind(cache: Any) -> Any:
    """What has to be equal in caches that are merged."""
    name = type(cache).__name__
    if type(cache) not in _SINGLE:
        known = ", ".join(kind.__name__ for kind in _SINGLE)
        raise ValueError(
            f"The target's cache {name} cannot be part of a batch; supported are {known}."
        )
    if isinstance(cache, CacheList):
        return name, [_kind(part) for part in cache.caches]
    if not isinstance(cache, RotatingKVCache):
        return name
    if cache.keep > 0:
        raise ValueError(
            f"The target's cache RotatingKVCache keeps its first {cache.keep} rows "
            "(max_kv_size) and cannot be part of a batch."
        )
    return name, cache.max_size


class BatchCache:
    """The target's caches of all sequences that are decoded together.

    A sequence that is alone keeps its own caches, which need no padding and no mask for it.

    Attributes:
        layers (list): The caches, one a layer; empty while no row has joined.
        num_rows (int): Sequences in them.
    """

    def __init__(self) -> None:
        self.layers: list[Any] = []
        self.num_rows = 0

    def join(self, prompt_caches: Sequence[list[Any]]) -> None:
        """Add rows by their own caches, which are emptied: a layer at a time saves memory."""
        rows = list(prompt_caches)
        if self.num_rows == 1:
            rows.insert(0, self.layers)
            self.layers, self.num_rows = [], 0
        self.num_rows += len(rows)
        if self.num_rows == 1:
            self.layers = list(rows[0])
            rows[0].clear()
            return
        for index in range(len(rows[0])):
            parts = [caches.pop(0) for caches in rows]
            merged = parts[0].merge(parts)
            if index < len(self.layers):
                self.layers[index].extend(merged)
            else:
                self.layers.append(merged)
            mx.eval(self.layers[index].state)

    def leave(self, stay: Sequence[int]) -> None:
        """Only these rows go on."""
        if len(stay) < 2:
            self.layers = self.extract(stay[0]) if stay else []
        else:
            for cache in self.layers:
                cache.filter(list(stay))
        self.num_rows = len(stay)

    def compact(self, positions: Sequence[int]) -> None:
        """Drop the padding that all rows share once a step's worth has gathered.

        Args:
            positions (sequence): Tokens that each row's cache covers.
        """
        for cache in _flat(self.layers):
            if isinstance(cache, BatchKVCache) and cache.size() - max(positions) >= cache.step:
                cache.filter(list(range(len(positions))))

    def extract(self, index: int) -> list[Any]:
        """A row's caches on their own."""
        if self.num_rows == 1:
            return list(self.layers)
        return [cache.extract(index) for cache in self.layers]


def _flat(caches: Sequence[Any]) -> list[Any]:
    lists = (_flat(c.caches) if isinstance(c, CacheList) else [c] for c in caches)
    return [cache for part in lists for cache in part]
