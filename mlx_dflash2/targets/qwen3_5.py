"""Qwen3.5, 3.6 and 3.8: gated-delta layers with a full-attention layer every few."""

import mlx.core as mx
import mlx.nn as nn

from .gated_delta import MixerRows
from .qwen3_next import HybridTarget


class Target(HybridTarget):
    def project(self, mixer: nn.Module, x: mx.array) -> MixerRows:
        B, L, _ = x.shape
        z = mixer.in_proj_z(x).reshape(B, L, mixer.num_v_heads, mixer.head_v_dim)
        return MixerRows(mixer.in_proj_qkv(x), z, mixer.in_proj_b(x), mixer.in_proj_a(x))
