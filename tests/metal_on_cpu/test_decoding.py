"""Whole generations with every op of the package a kernel on the bench."""

import pytest
from support.runs import check_counts, model_of, prompt_and_plain, proposers, run
from support.tiny import HYBRID, make_drafter

from mlx_dflash2.decode.sampling import Sampling
from mlx_dflash2.kernels import active_kernels


@pytest.fixture
def decoding(kernels):
    kernels.mode = "fast"
    return kernels


def test_tokens_of_a_recurrent_target(decoding):
    """Rounds of every outcome, their states brought up to date by the verify kernel."""
    prompt, plain = prompt_and_plain(HYBRID, 11)
    candidates = proposers(prompt, plain, 5)
    for name in ("oracle", "half1", "rand"):
        steps, stats = run(HYBRID, prompt, candidates[name], 12)
        assert [token for token, _ in steps] == plain[:12], name
        check_counts(steps, stats, name, 5)
    assert active_kernels() == {"gated_delta_verify": "metal"}


def test_the_stats_tell_what_was_not_on_metal(clang):
    prompt, _ = prompt_and_plain(HYBRID, 11)
    _, stats = run(HYBRID, prompt, make_drafter(), 4)
    assert stats.kernels["top_k"].startswith(("metal", "plain: "))
    plain = stats.kernels["top_k"] != "metal"
    assert ("Plain MLX for " in stats.summary()) == plain


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_of_a_whole_pair(decoding, temperature):
    prompt, plain = prompt_and_plain(HYBRID, 11)
    drafter = make_drafter()
    drafter.eval()
    sampling = {"sampler": Sampling(temp=temperature), "seed": 1} if temperature else {}
    steps, stats = run(HYBRID, prompt, drafter, 8, **sampling)
    assert len(steps) == 8 and stats.fallback is None and stats.drafted > 0
    if not temperature:
        assert [token for token, _ in steps] == plain[:8]
    assert set(stats.kernels.values()) == {"metal"}
    assert len(stats.kernels) == 5 and "Plain MLX" not in stats.summary()
    assert model_of(HYBRID).training is False
