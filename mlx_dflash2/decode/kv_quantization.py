"""Quantising the target's key-value caches where, and when, mlx-lm does."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import QuantizedKVCache, RotatingKVCache


@dataclass(frozen=True)
class KVQuantization:
    """The options ``kv_bits``, ``kv_group_size`` and ``quantized_kv_start`` of mlx-lm."""

    bits: int | None = None
    group_size: int = 64
    start: int = 5000

    def check(self, prompt_cache: Sequence[Any]):
        """Refuse bits, group sizes and cache classes that mlx-lm would fail on in mid-generation.

        Raises:
            ValueError: in one line, naming the option.
        """
        if self.bits is None:
            return
        if self.bits not in (2, 3, 4, 5, 6, 8):
            raise ValueError(f"`kv_bits` has to be 2, 3, 4, 5, 6 or 8 but is {self.bits}.")
        if self.group_size not in (32, 64, 128):
            raise ValueError(f"`kv_group_size` has to be 32, 64 or 128 but is {self.group_size}.")
        if any(isinstance(cache, RotatingKVCache) for cache in prompt_cache):
            raise ValueError(
                f"`kv_bits` is {self.bits}, but mlx-lm cannot quantise a RotatingKVCache, which "
                "this target, or `max_kv_size`, uses."
            )
        for cache in prompt_cache:
            if not isinstance(cache, QuantizedKVCache):
                continue
            if cache.bits != self.bits:
                raise ValueError(f"`kv_bits` is {self.bits} but the cache has {cache.bits} bits.")
            if cache.group_size != self.group_size:
                raise ValueError(
                    f"`kv_group_size` is {self.group_size} but the cache's is {cache.group_size}."
                )

    def check_heads(self, prompt_cache: Sequence[Any]):
        """Refuse heads that cannot be cut into groups, as soon as a pass shows how wide they are.

        Raises:
            ValueError: in one line, naming the option.
        """
        for cache in () if self.bits is None else prompt_cache:
            if not hasattr(cache, "to_quantized") or cache.keys is None:
                continue
            for width in (cache.keys.shape[-1], cache.values.shape[-1]):
                if width % self.group_size:
                    raise ValueError(
                        f"`kv_group_size` is {self.group_size} but the target's heads have "
                        f"{width} channels: they cannot be quantised in such groups."
                    )

    def apply(self, prompt_cache: list[Any]):
        """After a pass: quantise in place every cache that has reached the start."""
        maybe_quantize_kv_cache(prompt_cache, self.start, self.group_size, self.bits)

    def rows_at_once(self, prompt_cache: Sequence[Any]) -> float:
        """Rows that a pass may append before a cache is due: single steps would change it then."""
        waiting = () if self.bits is None else prompt_cache
        offsets = [cache.offset for cache in waiting if hasattr(cache, "to_quantized")]
        return max(1, self.start - max(offsets)) if offsets else float("inf")
