"""GPT-OSS: sliding and full layers in turn, mixture of experts."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask

from . import base


class Target(base.Target):
    def layer_inputs(self, tokens: mx.array, h: mx.array, cache: list[Any]) -> dict[str, Any]:
        inner = self.inner
        return {
            "full_attention": create_attention_mask(h, cache[inner.ga_idx]),
            "sliding_attention": create_attention_mask(
                h, cache[inner.swa_idx], window_size=inner.window_size
            ),
        }

    def run_layer(
        self, index: int, layer: nn.Module, h: mx.array, cache: Any, extras: Any
    ) -> mx.array:
        return layer(h, extras[self.inner.layer_types[index]], cache)
