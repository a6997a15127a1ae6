"""Muse Glimmer: sliding layers with a global layer every few, scaled and soft-capped logits."""

import mlx.core as mx
import mlx.nn as nn

from .base import SlidingTarget


class Target(SlidingTarget):
    def slides(self, layer: nn.Module) -> bool:
        return layer.self_attn.is_sliding

    @property
    def window(self) -> int:
        return self.inner.window

    def embed_inputs(self, tokens: mx.array) -> mx.array:
        # Only the target's own input is normed: drafters were trained on the raw rows.
        return mx.fast.rms_norm(self.inner.embed_tokens(tokens), None, self.inner.embed_eps)

    def transform(self, raw: mx.array) -> mx.array:
        args = self.language_model.args
        cap = args.final_logit_softcapping
        return mx.tanh(raw * args.output_multiplier / cap) * cap
