"""Gemma 3: sliding layers with a global layer every few, scaled embeddings."""

import mlx.core as mx
import mlx.nn as nn

from .base import SlidingTarget


class Target(SlidingTarget):
    def slides(self, layer: nn.Module) -> bool:
        return layer.self_attn.is_sliding

    @property
    def window(self) -> int:
        return self.inner.window_size

    def embed_inputs(self, tokens: mx.array) -> mx.array:
        h = self.inner.embed_tokens(tokens)
        # The scale is rounded to bfloat16, as in the model.
        return h * mx.array(self.inner.args.hidden_size**0.5, mx.bfloat16).astype(h.dtype)

    def embed(self, tokens: mx.array) -> mx.array:
        return self.embed_inputs(tokens)
