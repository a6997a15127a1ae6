"""Gated-delta layers run with a record of their recurrence, so that any of the rows can be kept."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gated_delta import gated_delta_update, normalize_qk

# The l2 norm's epsilon of these layers in mlx-lm.
QK_EPS = 1e-6


@dataclass
class GatedDeltaRecord:
    """A round's recurrence: its inputs, rows [B, L, ...], and the window and state before it."""

    mixer: nn.Module
    conv_input: mx.array
    inputs: tuple[mx.array, ...]
    state: mx.array | None

    def replay(self, keep: int) -> tuple[mx.array, mx.array]:
        """Conv window and state after the first ``keep`` rows; no projection is read again."""
        window = self.conv_input[:, keep : keep + self.mixer.conv_kernel_size - 1]
        return mx.contiguous(window), self._recur(keep)

    def replay_rows(self, keep: Sequence[int]) -> tuple[mx.array, mx.array]:
        """The same where sequence b of the batch keeps its first ``keep[b]`` rows."""
        ends, most = mx.array(keep)[:, None], max(keep)
        positions = ends + mx.arange(self.mixer.conv_kernel_size - 1)
        window = mx.take_along_axis(self.conv_input, positions[..., None], axis=1)
        return window, self._recur(most, mx.arange(most) < ends)

    def _recur(self, num_rows: int, mask: mx.array | None = None) -> mx.array:
        mixer = self.mixer
        rows = [x[:, :num_rows] for x in self.inputs]
        _, state = gated_delta_update(
            *rows, mixer.A_log, mixer.dt_bias, self.state, mask, use_kernel=not mixer.training
        )
        return state


def run_mixer(
    mixer: nn.Module, qkv: mx.array, z: mx.array, b: mx.array, a: mx.array, cache: Any
) -> tuple[mx.array, GatedDeltaRecord]:
    """The layer's mixer from its projected rows on.

    Shapes:
      - qkv: [B, L, 2 * Hk * Dk + Hv * Dv], the rows that enter the convolution
      - z: [B, L, Hv, Dv]; a, b: [B, L, Hv]
      - cache: the layer's ``ArraysCache``: conv window and state, updated in place
    """
    B, L, _ = qkv.shape
    conv_state, state = cache[0], cache[1]
    if conv_state is None:
        conv_state = mx.zeros((B, mixer.conv_kernel_size - 1, mixer.conv_dim), dtype=qkv.dtype)
    conv_input = mx.concatenate([conv_state, qkv], axis=1)
    cache[0] = mx.contiguous(conv_input[:, -(mixer.conv_kernel_size - 1) :])
    conv_output = nn.silu(mixer.conv1d(conv_input))
    q, k, v = mx.split(conv_output, [mixer.key_dim, 2 * mixer.key_dim], axis=-1)
    q = q.reshape(B, L, mixer.num_k_heads, mixer.head_k_dim)
    k = k.reshape(B, L, mixer.num_k_heads, mixer.head_k_dim)
    v = v.reshape(B, L, mixer.num_v_heads, mixer.head_v_dim)
    q, k = normalize_qk(q, k, inv_scale=mixer.head_k_dim**-0.5, eps=QK_EPS)
    output, cache[1] = gated_delta_update(
        q, k, v, a, b, mixer.A_log, mixer.dt_bias, state, use_kernel=not mixer.training
    )
    output = mixer.out_proj(mixer.norm(output, z).reshape(B, L, -1))
    return output, GatedDeltaRecord(mixer, conv_input, (q, k, v, a, b), state)
