"""Gated-delta layers run with a record of their recurrence, so that any of the rows can be kept."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache
from mlx_lm.models.gated_delta import compute_g, gated_delta_update, normalize_qk

from ..kernels.gated_delta_verify import DeltaRows, gated_delta_verify

# The l2 norm's epsilon of these layers in mlx-lm.
QK_EPS = 1e-6


@dataclass
class GatedDeltaRecord:
    """A round's recurrence: its inputs, rows [B, L, ...], and the window and state before it."""

    mixer: nn.Module
    conv_input: mx.array
    inputs: tuple[mx.array, ...]
    state: mx.array | None
    kept: Sequence[int] = ()
    replayed: mx.array | None = None

    def replay(self, keep: int) -> tuple[mx.array, mx.array]:
        """Conv window and state after the first ``keep`` rows; no projection is read again."""
        window = self.conv_input[:, keep : keep + self.mixer.conv_kernel_size - 1]
        return mx.contiguous(window), self._recur([keep] * self.conv_input.shape[0])

    def replay_rows(self, keep: Sequence[int]) -> tuple[mx.array, mx.array]:
        """The same where sequence b of the batch keeps its first ``keep[b]`` rows."""
        positions = mx.array(keep)[:, None] + mx.arange(self.mixer.conv_kernel_size - 1)
        window = mx.take_along_axis(self.conv_input, positions[..., None], axis=1)
        return window, self._recur(keep)

    def _recur(self, keep: Sequence[int]) -> mx.array:
        mixer, most = self.mixer, max(keep)
        rows = [x[:, :most] for x in self.inputs]
        ragged = min(keep) < most
        mask = mx.arange(most) < mx.array(keep)[:, None] if ragged else None
        _, state = gated_delta_update(
            *rows, mixer.A_log, mixer.dt_bias, self.state, mask, use_kernel=not mixer.training
        )
        self.kept, self.replayed = keep, state
        return state

    @cached_property
    def rows(self) -> DeltaRows:
        """The rows as :func:`gated_delta_verify` takes them."""
        _, k, v, a, b = self.inputs
        decay = compute_g(self.mixer.A_log, a, self.mixer.dt_bias)
        return DeltaRows(k, v, decay, mx.sigmoid(b))

    def verify(self, latest: "GatedDeltaRecord | None") -> mx.array | None:
        """The rows' outputs by the verify kernel, or ``None`` where that does not run.

        If the state is the one that ``latest`` left to be replayed, this does it in passing: the
        state itself, which no one else has asked for, is then never computed.
        """
        q = self.inputs[0]
        _, _, Hv, Dv = self.inputs[2].shape
        state = self.state
        if state is None:
            state = mx.zeros((q.shape[0], Hv, Dv, q.shape[-1]), dtype=mx.float32)
        if self.mixer.training:
            return None
        past, kept = self.rows, mx.zeros((q.shape[0],), mx.int32)
        if latest is not None and latest.replayed is state and latest.state is not None:
            past, kept, state = latest.rows, mx.array(list(latest.kept), mx.int32), latest.state
        if not gated_delta_verify.runs_kernel(q, self.rows, state, past, kept):
            return None
        output, self.state = gated_delta_verify.kernel(q, self.rows, state, past, kept)
        return output


# The last record of each cache whose state it left to be replayed.
Records = WeakKeyDictionary[ArraysCache, GatedDeltaRecord]


def run_mixer(
    mixer: nn.Module,
    qkv: mx.array,
    z: mx.array,
    b: mx.array,
    a: mx.array,
    cache: ArraysCache,
    records: Records,
) -> tuple[mx.array, GatedDeltaRecord]:
    """The layer's mixer from its projected rows on.

    Shapes:
      - qkv: [B, L, 2 * Hk * Dk + Hv * Dv], the rows that enter the convolution
      - z: [B, L, Hv, Dv]; a, b: [B, L, Hv]
      - cache: the layer's conv window and state, updated in place
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
    record = GatedDeltaRecord(mixer, conv_input, (q, k, v, a, b), state)
    output = record.verify(records.get(cache))
    if output is None:
        output, cache[1] = gated_delta_update(
            q, k, v, a, b, mixer.A_log, mixer.dt_bias, state, use_kernel=not mixer.training
        )
    else:
        _, cache[1] = record.replay(L)
        records[cache] = record
    return mixer.out_proj(mixer.norm(output, z).reshape(B, L, -1)), record
