"""Quantize the target's key-value caches where, and when, mlx-lm does."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import QuantizedKVCache, RotatingKVCache

from .defaults import KV_GROUP_SIZE, QUANTIZED_KV_START

BITS, GROUP_SIZES = (2, 3, 4, 5, 6, 8), (32, 64, 128)


@dataclass(frozen=True)
class KVQuantization:
    """The options ``kv_bits``, ``kv_group_size`` and ``quantized_kv_start`` of mlx-lm.

    Raises:
        ValueError: in one line, naming the option that is out of range.
    """

    bits: int | None = None
    group_size: int = KV_GROUP_SIZE
    start: int = QUANTIZED_KV_START

    def __post_init__(self) -> None:
        if self.bits is None:
            return
        for option, value, allowed in (
            ("kv_bits", self.bits, BITS),
            ("kv_group_size", self.group_size, GROUP_SIZES),
        ):
            if value not in allowed:
                choices = ", ".join(map(str, allowed))
                raise ValueError(f"`{option}` is {value} but has to be one of {choices}.")

    def check(self, prompt_cache: Sequence[Any]) -> None:
        """Refuse caches that mlx-lm would fail to quantize in the middle of a generation.

        Raises:
            ValueError: in one line, naming the option.
        """
        if self.bits is None:
            return
        if any(isinstance(cache, RotatingKVCache) for cache in prompt_cache):
            raise ValueError(
                f"`kv_bits` is {self.bits} but has to be None: mlx-lm cannot quantize a "
                "RotatingKVCache, which this target, or `max_kv_size`, uses."
            )
        for cache in prompt_cache:
            if not isinstance(cache, QuantizedKVCache):
                continue
            if cache.bits != self.bits:
                raise ValueError(
                    f"`kv_bits` is {self.bits} but has to be {cache.bits}, as in the prompt cache."
                )
            if cache.group_size != self.group_size:
                raise ValueError(
                    f"`kv_group_size` is {self.group_size} but has to be {cache.group_size}, as in "
                    "the prompt cache."
                )

    def check_heads(self, prompt_cache: Sequence[Any]) -> None:
        """Refuse a group size that does not divide the heads, once a pass has shown their width.

        Raises:
            ValueError: in one line, naming the option.
        """
        for cache in () if self.bits is None else prompt_cache:
            if not hasattr(cache, "to_quantized") or cache.keys is None:
                continue
            for width in (cache.keys.shape[-1], cache.values.shape[-1]):
                if width % self.group_size:
                    raise ValueError(
                        f"`kv_group_size` is {self.group_size} but has to divide {width}, the "
                        "channels of the target's heads."
                    )

    def apply(self, prompt_cache: list[Any]) -> None:
        """Quantize in place, after a pass, every cache that has reached the start."""
        maybe_quantize_kv_cache(prompt_cache, self.start, self.group_size, self.bits)

    def rows_at_once(self, prompt_cache: Sequence[Any]) -> float:
        """Count the rows that a pass may append before a cache has to be quantized.

        Single steps would quantize it at that row, so a pass must not go beyond it.
        """
        waiting = () if self.bits is None else prompt_cache
        offsets = [cache.offset for cache in waiting if hasattr(cache, "to_quantized")]
        return max(1, self.start - max(offsets)) if offsets else float("inf")
