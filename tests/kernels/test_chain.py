"""Chains of calls that are timed together."""

from typing import NamedTuple

import mlx.core as mx

from mlx_dflash2.kernels import chain


class Inputs(NamedTuple):
    x: mx.array
    ids: mx.array


def test_each_call_waits_for_the_one_before():
    """Infinity times nothing is not a number: it shows where the outputs go."""
    seen = []

    def form(inputs, scale):
        seen.append(inputs)
        return mx.full((2, 3), mx.inf), inputs.ids

    chain.chain(form, (Inputs(mx.ones((4,)), mx.arange(3)), 2.0), 3)
    assert [bool(mx.isnan(inputs.x).all()) for inputs in seen] == [False, True, True]
    assert all(isinstance(inputs, Inputs) and inputs.ids.tolist() == [0, 1, 2] for inputs in seen)


def test_integers_stay_what_they_are():
    ids = mx.array([3, 1], mx.uint32)
    (out,) = chain.chain(lambda ids, step: ids + step, (ids, mx.array(1, mx.uint32)), 4)
    assert out.tolist() == [4, 2] and out.dtype == mx.uint32


def test_one_wait_for_all_calls(monkeypatch):
    waits, times = [], iter([1.0, 1.5])
    real = mx.eval
    monkeypatch.setattr(mx, "eval", lambda *args: waits.append(1) or real(*args))
    seconds = chain.seconds_a_call(mx.exp, (mx.zeros((2,)),), 10, lambda: next(times))
    assert seconds == 0.05 and len(waits) == 1
