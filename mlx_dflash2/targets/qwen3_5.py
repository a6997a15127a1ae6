"""Qwen3.5, 3.6 and 3.8: gated-delta layers with a full-attention layer every few."""

import mlx.core as mx
import mlx.nn as nn

from .gated_delta import MixerRows
from .qwen3_next import HybridTarget


class Target(HybridTarget):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        mixers = (layer.linear_attn for layer in self.layers if layer.is_linear)
        if any(mixer.sharding_group is not None for mixer in mixers):
            raise ValueError("A target that is split over several machines is not supported.")

    def project(self, mixer: nn.Module, x: mx.array) -> MixerRows:
        B, L, _ = x.shape
        z = mixer.in_proj_z(x).reshape(B, L, mixer.num_v_heads, mixer.head_v_dim)
        return MixerRows(mixer.in_proj_qkv(x), z, mixer.in_proj_b(x), mixer.in_proj_a(x))
