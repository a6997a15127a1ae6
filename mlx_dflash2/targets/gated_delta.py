"""Gated-delta layers that record their recurrence, so that any of its rows can be kept."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, cast
from weakref import WeakKeyDictionary

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache
from mlx_lm.models.gated_delta import compute_g, gated_delta_update, normalize_qk

from ..kernels.gated_delta_verify import DeltaRows, gated_delta_verify

# The l2 norm's epsilon of these layers in mlx-lm.
QK_EPS = 1e-6


class MixerRows(NamedTuple):
    """What a layer's mixer projects from its input.

    Attributes:
        qkv (mx.array): The rows that enter the convolution, [B, L, 2 * Hk * Dk + Hv * Dv].
        z (mx.array): The output's gate, [B, L, Hv, Dv].
        b (mx.array): [B, L, Hv].
        a (mx.array): [B, L, Hv].
    """

    qkv: mx.array
    z: mx.array
    b: mx.array
    a: mx.array


class Recurrence(NamedTuple):
    """The inputs of a recurrence over L rows: q, k [B, L, Hk, Dk]; v [B, L, Hv, Dv]; a, b."""

    q: mx.array
    k: mx.array
    v: mx.array
    a: mx.array
    b: mx.array

    def run(
        self, mixer: nn.Module, state: mx.array | None, mask: mx.array | None = None
    ) -> tuple[mx.array, mx.array]:
        """Run mlx-lm's recurrence from a state; returns the outputs and the state after it."""
        use_kernel = not mixer.training
        return gated_delta_update(
            *self, mixer.A_log, mixer.dt_bias, state=state, mask=mask, use_kernel=use_kernel
        )


@dataclass
class GatedDeltaRecord:
    """A pass over a layer, from which any number of its first rows can be kept.

    Attributes:
        mixer: The layer's mixer.
        conv_input: The rows that entered the convolution, after the window before them.
        inputs: Of the recurrence.
        state: The state before the pass; ``None`` for all zeros.
        after: The state after all rows, where the pass computed it.
        kept: How many rows each sequence of the batch has kept.
        replayed: The state after those.
    """

    mixer: nn.Module
    conv_input: mx.array
    inputs: Recurrence
    state: mx.array | None
    after: mx.array | None = None
    kept: Sequence[int] = ()
    replayed: mx.array | None = None

    def replay(self, keep: int) -> tuple[mx.array, mx.array]:
        """Compute conv window and state after the first ``keep`` rows, without projections."""
        window = self.conv_input[:, keep : keep + self.mixer.conv_kernel_size - 1]
        return mx.contiguous(window), self._recur([keep] * self.conv_input.shape[0])

    def replay_rows(self, keep: Sequence[int]) -> tuple[mx.array, mx.array]:
        """Do the same where sequence b of the batch keeps its first ``keep[b]`` rows."""
        positions = mx.array(list(keep))[:, None] + mx.arange(self.mixer.conv_kernel_size - 1)
        window = mx.take_along_axis(self.conv_input, positions[..., None], axis=1)
        return window, self._recur(keep)

    def _recur(self, keep: Sequence[int]) -> mx.array:
        self.kept, self.replayed = keep, self._after(keep)
        return self.replayed

    def _after(self, keep: Sequence[int]) -> mx.array:
        most, rows = max(keep), self.inputs.q.shape[1]
        if self.after is None:
            # A single op, which the next verify pass does in passing: then nobody computes it.
            kept = mx.array(list(keep), mx.int32)
            past, state = self.rows, cast(mx.array, self.state)
            return gated_delta_verify.kernel(self.inputs.q, past, state, past, kept)[1]
        if min(keep) == rows:
            return self.after
        mask = None
        if min(keep) < most:
            mask = mx.arange(most) < mx.array(list(keep))[:, None]
        kept_rows = Recurrence(*(x[:, :most] for x in self.inputs))
        return kept_rows.run(self.mixer, self.state, mask)[1]

    @cached_property
    def rows(self) -> DeltaRows:
        """The rows as :func:`gated_delta_verify` takes them."""
        _, k, v, a, b = self.inputs
        decay = compute_g(self.mixer.A_log, a, self.mixer.dt_bias)
        return DeltaRows(k, v, decay, mx.sigmoid(b))

    def verify(self, latest: "GatedDeltaRecord | None") -> mx.array | None:
        """Compute the rows' outputs with the verify kernel; ``None`` where it does not run.

        If the state is the one that ``latest`` left to be replayed, the kernel does that as well:
        the state itself, which nobody else has asked for, is then never computed.
        """
        q = self.inputs.q
        _, _, Hv, Dv = self.inputs.v.shape
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
    mixer: nn.Module, rows: MixerRows, cache: ArraysCache, records: Records
) -> tuple[mx.array, GatedDeltaRecord]:
    """Run a layer's mixer from its projected rows on; the cache waits for the record's replay.

    Args:
        mixer (nn.Module): The layer's ``linear_attn``.
        rows (MixerRows): The projected rows.
        cache (ArraysCache): The layer's conv window and state before the rows.
        records (Records): The target's.

    Returns:
        tuple: The mixer's output [B, L, H], and the record of the pass.
    """
    qkv, z, b, a = rows
    B, L, _ = qkv.shape
    conv_state, state = cache[0], cache[1]
    if conv_state is None:
        conv_state = mx.zeros((B, mixer.conv_kernel_size - 1, mixer.conv_dim), dtype=qkv.dtype)
    conv_input = mx.concatenate([conv_state, qkv], axis=1)
    conv_output = nn.silu(mixer.conv1d(conv_input))
    q, k, v = mx.split(conv_output, [mixer.key_dim, 2 * mixer.key_dim], axis=-1)
    q = q.reshape(B, L, mixer.num_k_heads, mixer.head_k_dim)
    k = k.reshape(B, L, mixer.num_k_heads, mixer.head_k_dim)
    v = v.reshape(B, L, mixer.num_v_heads, mixer.head_v_dim)
    q, k = normalize_qk(q, k, inv_scale=mixer.head_k_dim**-0.5, eps=QK_EPS)
    inputs = Recurrence(q, k, v, a, b)
    record = GatedDeltaRecord(mixer, conv_input, inputs, state)
    output = record.verify(records.get(cache))
    if output is None:
        output, record.after = inputs.run(mixer, state)
    else:
        records[cache] = record
    return mixer.out_proj(mixer.norm(output, z).reshape(B, L, -1)), record
