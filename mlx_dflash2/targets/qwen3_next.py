"""Qwen3-Next: gated-delta layers with a full-attention layer every few."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask, create_ssm_mask

from . import base
from .gated_delta import GatedDeltaRecord, MixerRows, Records, run_mixer


class HybridTarget(base.Target):
    """Layers that are either recurrent (``is_linear``) or attend to everything."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.records = Records()

    def layer_inputs(self, tokens: mx.array, h: mx.array, cache: list[Any]) -> dict[bool, Any]:
        masks: dict[bool, Any] = {}
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            if layer.is_linear not in masks:
                create = create_ssm_mask if layer.is_linear else create_attention_mask
                masks[layer.is_linear] = create(h, layer_cache)
        return masks

    def run_layer(
        self, index: int, layer: nn.Module, h: mx.array, cache: Any, extras: Any
    ) -> mx.array:
        return layer(h, mask=extras[layer.is_linear], cache=cache)

    def is_recurrent(self, index: int) -> bool:
        return self.layers[index].is_linear

    def run_recorded(
        self, layer: nn.Module, h: mx.array, cache: Any
    ) -> tuple[mx.array, GatedDeltaRecord]:
        mixer = layer.linear_attn
        rows = self.project(mixer, layer.input_layernorm(h))
        r, record = run_mixer(mixer, rows, cache, self.records)
        h = h + r
        return h + layer.mlp(layer.post_attention_layernorm(h)), record

    def project(self, mixer: nn.Module, x: mx.array) -> MixerRows:
        """Compute the mixer's input projections of normed rows [B, L, H]."""
        raise NotImplementedError


class Target(HybridTarget):
    def project(self, mixer: nn.Module, x: mx.array) -> MixerRows:
        B, L, _ = x.shape
        q, k, v, z, b, a = mixer.fix_query_key_value_ordering(
            mixer.in_proj_qkvz(x), mixer.in_proj_ba(x)
        )
        qkv = mx.concatenate([t.reshape(B, L, -1) for t in (q, k, v)], axis=-1)
        return MixerRows(qkv, z, b, a)
