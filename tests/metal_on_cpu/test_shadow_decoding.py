"""Whole generations whose products of few rows all take the kernel, on the bench."""

import pytest
from support.runs import check_counts, model_of, prompt_and_plain, proposers, run
from support.tiny import DENSE, HYBRID, make_drafter

from mlx_dflash2.decode import loop
from mlx_dflash2.decode.session import DFlashPromptCache
from mlx_dflash2.kernels.shadow import RowsLinear, shadow


@pytest.fixture
def decoding(kernels, monkeypatch):
    kernels.mode = "fast"
    monkeypatch.setattr(
        loop, "faster", lambda models, _: [shadow(m, lambda _: range(2, 17)) for m in models]
    )
    return kernels


@pytest.mark.parametrize("kind", [DENSE, HYBRID])
def test_tokens_are_those_of_the_model_itself(decoding, kind):
    prompt, plain = prompt_and_plain(kind, 5, bits=4)
    candidates = proposers(prompt, plain, 5)
    for name in ("oracle", "half1"):
        steps, stats = run(kind, prompt, candidates[name], 8, bits=4)
        assert [token for token, _ in steps] == plain[:8], name
        check_counts(steps, stats, name, 5)
    assert decoding.launched.count("qmm_rows") > 20
    assert not any(isinstance(m, RowsLinear) for m in model_of(kind, 4).modules())


def test_a_conversation_keeps_its_context(decoding):
    """The cache belongs to the caller's drafter, not to the shadow of one generation."""
    prompt, _ = prompt_and_plain(DENSE, 5, bits=4)
    drafter = make_drafter()
    cache = DFlashPromptCache(model_of(DENSE, 4), drafter)
    run(DENSE, prompt, drafter, 4, bits=4, prompt_cache=cache)
    context = cache.context
    run(DENSE, prompt[:2], drafter, 4, bits=4, prompt_cache=cache)
    assert cache.context is context and cache.draft_model is drafter
