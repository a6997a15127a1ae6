"""The recurrence of a verify pass over a gated-delta layer, with deferred replay."""

from typing import NamedTuple

import mlx.core as mx
from mlx_lm.models.gated_delta import gated_delta_ops

from ._common import LIBRARY, Op, Probe, patterns

_SIMDGROUPS = 4


class DeltaRows(NamedTuple):
    """What the rows of a pass write into the state; a row is one position.

    Attributes:
        k (mx.array): Normalized keys, [B, T, Hk, Dk].
        v (mx.array): Values, [B, T, Hv, Dv].
        g (mx.array): Decay, [B, T, Hv].
        beta (mx.array): Step, [B, T, Hv].
    """

    k: mx.array
    v: mx.array
    g: mx.array
    beta: mx.array


def gated_delta_verify_ops(
    q: mx.array, rows: DeltaRows, state: mx.array, past: DeltaRows, kept: mx.array
) -> tuple[mx.array, mx.array]:
    """Replay the rows that the last pass kept, then run the new rows for their outputs.

    A verify pass does not know yet which of its rows will stay. So it leaves the state as it was
    before them, and the next pass brings it up to date: no state is put back, none is written
    twice, and ``kept`` may be an array that is not computed yet. Equal to
    :func:`mlx_lm.models.gated_delta.gated_delta_ops` on the kept and the new rows.

    Args:
        q (mx.array): Normalized queries of the new rows, [B, T, Hk, Dk].
        rows (DeltaRows): The new rows.
        state (mx.array): The state before the last pass, [B, Hv, Dv, Dk].
        past (DeltaRows): The P rows of the last pass.
        kept (mx.array): How many of them to replay, [B] integers, at most P.

    Returns:
        tuple of mx.array: The outputs [B, T, Hv, Dv], dtype of ``q``, and the state after the
        replayed rows and before the new ones.
    """
    stays = mx.arange(past.k.shape[1])[None] < kept[:, None]
    _, state = gated_delta_ops(past.k, *past, state, stays)
    y, _ = gated_delta_ops(q, *rows, state)
    return y, state


def gated_delta_verify_kernel(
    q: mx.array, rows: DeltaRows, state: mx.array, past: DeltaRows, kept: mx.array
) -> tuple[mx.array, mx.array]:
    """Compute :func:`gated_delta_verify_ops` in one launch that reads and writes the state once."""
    B, T, Hk, Dk = rows.k.shape
    Hv, Dv = rows.v.shape[2:]
    held = 4 if Dv % 4 == 0 else 1
    past_names = (f"past_{name}" for name in DeltaRows._fields)
    names = ("q", *DeltaRows._fields, "state", *past_names, "kept")
    kernel = LIBRARY.kernel("gated_delta_verify", names, ("y", "new_state"), ("gated_delta.h",))
    y, new_state = kernel(
        inputs=[q, *rows, state, *past, kept],
        template=[
            ("O", q.dtype),
            ("S", state.dtype),
            ("Hk", Hk),
            ("Hv", Hv),
            ("Dk", Dk),
            ("Dv", Dv),
            ("ROWS", held),
        ],
        grid=(32, Dv // held, B * Hv),
        threadgroup=(32, min(_SIMDGROUPS, Dv // held), 1),
        output_shapes=[(B, T, Hv, Dv), state.shape],
        output_dtypes=[q.dtype, state.dtype],
    )
    return y, new_state


def _probe(
    q: mx.array, rows: DeltaRows, state: mx.array, past: DeltaRows, kept: mx.array
) -> Probe | None:
    # The kernel does not take a decay of its own for each column of the state.
    if rows.g.ndim != 3 or rows.k.size == 0:
        return None
    tails, dtypes = [x.shape[2:] for x in (q, *rows)], [x.dtype for x in (q, *rows, state)]

    def example() -> tuple:
        shapes = [*((1, 2, *tail) for tail in tails), (1, *state.shape[1:])]
        new_q, *new, old = patterns(shapes, dtypes)
        halves = DeltaRows(*(x * 0.5 for x in new))
        return new_q, DeltaRows(*new), old, halves, mx.ones((1,), mx.int32)

    return Probe((*rows.k.shape[2:], *rows.v.shape[2:], *dtypes), example)


gated_delta_verify = Op(gated_delta_verify_kernel, gated_delta_verify_ops, _probe)
