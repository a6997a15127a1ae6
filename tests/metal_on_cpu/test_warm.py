"""What is compiled and tried when a pair is bound, so that no round's time includes it."""

import mlx.core as mx
import pytest
from mlx_lm.generate import generation_stream
from support.runs import model_of
from support.tiny import HYBRID, make_drafter

from mlx_dflash2.decode import generate
from mlx_dflash2.decode.options import GenerationOptions
from mlx_dflash2.decode.stats import Stats
from mlx_dflash2.kernels import _common, active_kernels


def bind(drafter):
    judge = generate.make_judge(GenerationOptions())
    options = GenerationOptions(verify_width=4)
    return generate.make_loop(
        model_of(HYBRID), drafter, options, [judge], generation_stream, Stats()
    ), judge


@pytest.fixture
def bench(kernels, monkeypatch):
    """The bench as the default device's GPU."""
    kernels.mode = "fast"
    monkeypatch.setattr(generate, "mx", _AsGpu())
    return kernels


class _AsGpu:
    gpu = mx.gpu

    def default_device(self):
        return mx.gpu

    def __getattr__(self, name):
        return getattr(mx, name)


def test_rounds_try_no_kernel(bench, monkeypatch):
    drafter = make_drafter()
    drafter.eval()
    loop, judge = bind(drafter)
    assert set(active_kernels().values()) == {"metal"} and len(active_kernels()) == 5
    assert loop.stats.rounds == loop.stats.prefills == 0
    monkeypatch.setattr(_common, "disagreement", None)
    sequence = loop.open(judge)
    decision = loop.prefill(sequence, mx.arange(9), 512)
    decision.taken = 1
    for _ in range(2):
        (decision,) = loop.next_round([sequence], sequence.caches, [8])
        decision.taken = len(decision.tokens)
    loop.close(sequence)
    assert loop.stats.drafted > 0 and loop.stats.fallback is None


def test_only_the_first_binding_warms_up(bench):
    drafter = make_drafter()
    bind(drafter)
    bench.launched.clear()
    bind(drafter)
    assert bench.launched == []


def test_a_drafter_that_fails_on_the_device_stops_nothing(bench, monkeypatch):
    drafter = make_drafter()

    def fails(*_, **__):
        raise RuntimeError("out of registers")

    monkeypatch.setattr(type(drafter), "propose", fails)
    with pytest.warns(UserWarning, match="out of registers"):
        loop, _ = bind(drafter)
    assert not loop.drafts
