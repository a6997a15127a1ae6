"""Llama, Mistral, SmolLM2 and their kin, some of them with sliding layers."""

import mlx.nn as nn

from .base import SlidingTarget


class Target(SlidingTarget):
    def slides(self, layer: nn.Module) -> bool:
        return layer.use_sliding

    @property
    def window(self) -> int:
        return self.inner.sliding_window
