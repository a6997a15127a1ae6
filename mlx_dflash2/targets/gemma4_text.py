"""Gemma 4: shared keys and values, per-layer inputs, soft-capped logits."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gemma4_text import logit_softcap

from .base import SlidingTarget


class Target(SlidingTarget):
    def slides(self, layer: nn.Module) -> bool:
        return layer.self_attn.is_sliding

    @property
    def window(self) -> int:
        return self.inner.window_size

    def embed_inputs(self, tokens: mx.array) -> mx.array:
        return self.inner.embed_tokens(tokens) * self.inner.embed_scale

    def embed(self, tokens: mx.array) -> mx.array:
        return self.embed_inputs(tokens)

    def layer_inputs(self, tokens: mx.array, h: mx.array, cache: list[Any]) -> Any:
        # Later layers read the keys and values of an earlier one: (keys and values, offset) each.
        shared: list[Any] = [(None, None)] * len(self.layers)
        return super().layer_inputs(tokens, h, cache), shared, self.per_layer_inputs(tokens, h)

    def run_layer(
        self, index: int, layer: nn.Module, h: mx.array, cache: Any, extras: Any
    ) -> mx.array:
        masks, shared, per_layer = extras
        keys_values, offset = shared[self.inner.previous_kvs[index]]
        h, *shared[index] = layer(
            h,
            masks[self.slides(layer)],
            cache,
            per_layer_input=None if per_layer is None else per_layer[:, :, index],
            shared_kv=keys_values,
            offset=offset,
        )
        return h

    def per_layer_inputs(self, tokens: mx.array, h: mx.array) -> mx.array | None:
        """Compute the second embedding of small models, [B, L, layers, D], or ``None``."""
        inner = self.inner
        size = inner.hidden_size_per_layer_input
        if not size:
            return None
        shape = (len(self.layers), size)
        rows = inner.embed_tokens_per_layer(tokens) * inner.embed_tokens_per_layer_scale
        projected = inner.per_layer_model_projection(h) * inner.per_layer_projection_scale
        projected = inner.per_layer_projection_norm(mx.unflatten(projected, -1, shape))
        return (projected + mx.unflatten(rows, -1, shape)) * inner.per_layer_input_scale

    def transform(self, raw: mx.array) -> mx.array:
        cap = self.language_model.final_logit_softcapping
        return raw if cap is None else logit_softcap(cap, raw)
