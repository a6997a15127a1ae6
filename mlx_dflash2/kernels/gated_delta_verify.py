"""The recurrence of a verify pass over a gated-delta layer, with deferred replay."""

import mlx.core as mx
from mlx_lm.models.gated_delta import gated_delta_ops

from ._common import build, pattern, use_kernel

# The rows of the last pass: k, v, g and beta, shaped as those of the new one.
Past = tuple[mx.array, mx.array, mx.array, mx.array]

_SIMDGROUPS = 4


def gated_delta_verify_ops(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array,
    past: Past,
    kept: mx.array,
) -> tuple[mx.array, mx.array]:
    """Replay the rows that the last pass kept, then run the new rows for their outputs.

    A verify pass does not know yet which of its rows will stay. So it leaves the state as it is
    before them, and the next pass brings it up to date: no state is put back, none is written
    twice, and ``kept`` may be an array that is not computed yet. Equal to
    :func:`mlx_lm.models.gated_delta.gated_delta_ops` on the kept and the new rows.

    Shapes:
      - q, k: [B, T, Hk, Dk], normalised
      - v: [B, T, Hv, Dv]
      - g, beta: [B, T, Hv], decay and step
      - state: [B, Hv, Dv, Dk], as it was before the last pass
      - past: k, v, g and beta of the last pass, with P rows
      - kept: [B] integers, at most P
    Returns:
      - y: [B, T, Hv, Dv], dtype of ``q``
      - state: [B, Hv, Dv, Dk], after the kept rows and before the new ones
    """
    past_k, past_v, past_g, past_beta = past
    stays = mx.arange(past_k.shape[1])[None] < kept[:, None]
    _, state = gated_delta_ops(past_k, past_k, past_v, past_g, past_beta, state, stays)
    y, _ = gated_delta_ops(q, k, v, g, beta, state)
    return y, state


def gated_delta_verify_kernel(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array,
    past: Past,
    kept: mx.array,
) -> tuple[mx.array, mx.array]:
    """As :func:`gated_delta_verify_ops`, in one launch that reads and writes the state once."""
    B, T, Hk, Dk = k.shape
    Hv, Dv = v.shape[2:]
    rows = 4 if Dv % 4 == 0 else 1
    names = ("q", "k", "v", "g", "beta", "state")
    names += ("past_k", "past_v", "past_g", "past_beta", "kept")
    kernel = build("gated_delta_verify", names, ("y", "new_state"), ("gated_delta.h",))
    return tuple(
        kernel(
            inputs=[q, k, v, g, beta, state, *past, kept],
            template=[
                ("O", q.dtype),
                ("S", state.dtype),
                ("Hk", Hk),
                ("Hv", Hv),
                ("Dk", Dk),
                ("Dv", Dv),
                ("ROWS", rows),
            ],
            grid=(32, Dv // rows, B * Hv),
            threadgroup=(32, min(_SIMDGROUPS, Dv // rows), 1),
            output_shapes=[(B, T, Hv, Dv), state.shape],
            output_dtypes=[q.dtype, state.dtype],
        )
    )


def has_kernel(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array
) -> bool:
    """Whether the kernel runs for rows like these; it does not for a decay of each column."""
    if g.ndim != 3 or k.size == 0:
        return False
    Hk, Dk, Hv, Dv = *k.shape[2:], *v.shape[2:]
    dtypes = tuple(x.dtype for x in (q, k, v, g, beta, state))

    def example() -> tuple:
        shapes = [(1, 2, Hk, Dk)] * 2 + [(1, 2, Hv, Dv)] + [(1, 2, Hv)] * 2 + [(1, Hv, Dv, Dk)]
        new = [pattern(s, d, i) for i, (s, d) in enumerate(zip(shapes, dtypes, strict=True))]
        return *new, tuple(x * 0.5 for x in new[1:5]), mx.ones((1,), mx.int32)

    specialisation = (Hk, Dk, Hv, Dv, *dtypes)
    kernel, ops = gated_delta_verify_kernel, gated_delta_verify_ops
    return use_kernel(kernel, ops, specialisation, example)


def gated_delta_verify(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array,
    past: Past,
    kept: mx.array,
) -> tuple[mx.array, mx.array]:
    """:func:`gated_delta_verify_kernel` where it runs, else :func:`gated_delta_verify_ops`."""
    runs = has_kernel(q, k, v, g, beta, state)
    form = gated_delta_verify_kernel if runs else gated_delta_verify_ops
    return form(q, k, v, g, beta, state, past, kept)
