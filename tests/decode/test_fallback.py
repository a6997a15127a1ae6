"""A drafter that fails costs speed: decoding goes on, one warning says so, and the stats too."""

import warnings

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from support.proposers import half, oracle, rand
from support.tiny import DENSE, HYBRID, VOCAB, make_drafter, make_model, plain_tokens

from mlx_dflash2 import make_sampler
from mlx_dflash2.decode.stats import Stats
from mlx_dflash2.generate import dflash_generate_step
from mlx_dflash2.kernels import PlainFormWarning

PROMPT = list(range(3, 20))


def run(model, proposer, **kwargs):
    stats = Stats()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # A machine without Metal says so once, in whichever test comes first.
        warnings.simplefilter("ignore", PlainFormWarning)
        steps = dflash_generate_step(
            mx.array(PROMPT), model, proposer, max_tokens=30, stats=stats, **kwargs
        )
        tokens = [token for token, _, _ in steps]
    return tokens, stats, [str(warning.message) for warning in caught]


@pytest.mark.parametrize("error", [RuntimeError("boom"), ValueError("bad"), IndexError("far")])
@pytest.mark.parametrize("kind", [DENSE, HYBRID])
@pytest.mark.parametrize("step", ["propose", "extend"])
def test_an_exception_in_the_drafter(kind, step, error):
    model = make_model(kind)
    plain = plain_tokens(model, PROMPT, 30)
    proposer, calls = half(PROMPT + plain, VOCAB, 2), []
    original = getattr(proposer, step)

    def fails_at_the_third(*args):
        calls.append(1)
        if len(calls) == 3:
            raise error
        return original(*args)

    setattr(proposer, step, fails_at_the_third)
    tokens, stats, messages = run(model, proposer)
    assert tokens == plain
    assert len(calls) == 3 and stats.draft_failures == 1 and stats.accepted > 0
    assert len(messages) == 1 and str(error) in messages[0] and str(error) in stats.fallback
    assert stats.generation_tokens == 30 and stats.draft_error is error


@pytest.mark.parametrize("error", [RuntimeError("lost"), MemoryError(), AttributeError("typo")])
@pytest.mark.parametrize("step", ["propose", "extend"])
def test_only_the_device_may_fail_in_our_own_drafter(step, error, monkeypatch):
    """A fault of this package is seen; a device that gives up costs the drafts."""
    model, drafter = make_model(DENSE), make_drafter()
    plain = plain_tokens(model, PROMPT, 30)
    calls, original = [], getattr(drafter, step)

    def fails_at_the_third(*args):
        calls.append(1)
        if len(calls) == 3:
            raise error
        return original(*args)

    monkeypatch.setattr(drafter, step, fails_at_the_third)
    if isinstance(error, AttributeError):
        with pytest.raises(AttributeError, match="typo"):
            run(model, drafter)
        return
    tokens, stats, messages = run(model, drafter)
    assert tokens == plain and stats.draft_error is error and len(messages) == 1


def test_nothing_else_is_swallowed():
    model = make_model(DENSE)
    proposer = oracle(PROMPT)

    def interrupted(*args):
        raise KeyboardInterrupt

    proposer.propose = interrupted
    with pytest.raises(KeyboardInterrupt):
        run(model, proposer)


@pytest.mark.parametrize("kind", [DENSE, HYBRID])
def test_non_finite_drafts(kind):
    model = make_model(kind)
    plain = plain_tokens(model, PROMPT, 30)
    tokens, stats, messages = run(model, oracle(PROMPT + plain, finite=False))
    assert tokens == plain
    assert stats.draft_failures == 1 and "non-finite" in stats.fallback and len(messages) == 1


def test_a_real_drafter_that_overflows():
    model, drafter = make_model(DENSE), make_drafter()
    drafter.layers[0].mlp.down_proj.weight = mx.full((64, 128), float("inf"))
    tokens, stats, messages = run(model, drafter)
    assert tokens == plain_tokens(model, PROMPT, 30)
    assert stats.draft_failures == 1 and len(messages) == 1
    assert "non-finite" in stats.fallback and "non-finite" in stats.summary()


def test_a_full_ring_with_a_kept_head_stops_drafting():
    """`max_kv_size` in mlx-lm: exact up to its end, then plain, and said so."""
    from mlx_lm.generate import generate_step
    from mlx_lm.models.cache import make_prompt_cache

    model = make_model(DENSE)
    plain = [t for t, _ in generate_step(mx.array(PROMPT), model, max_tokens=30, max_kv_size=32)]
    prompt_cache = make_prompt_cache(model, max_kv_size=32)
    tokens, stats, messages = run(model, oracle(PROMPT + plain), prompt_cache=prompt_cache)
    assert tokens == plain
    assert stats.accepted > 0 and stats.draft_failures == 0
    assert len(messages) == 1 and "max_kv_size" in stats.fallback


@pytest.mark.parametrize("finite, message", [(False, "non-finite"), (True, "rarely accepted")])
def test_a_warning_that_is_an_error_leaves_the_caller_s_cache_right(finite, message):
    model, emitted = make_model(DENSE), []
    prompt_cache = make_prompt_cache(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", PlainFormWarning)
        with pytest.raises(UserWarning, match=message):
            for token, _, _ in dflash_generate_step(
                mx.array(PROMPT), model, rand(7, VOCAB, finite=finite), max_tokens=60,
                sampler=make_sampler(1.0), seed=3, prompt_cache=prompt_cache,
            ):  # fmt: skip
                emitted.append(token)
    assert emitted
    fresh = make_prompt_cache(model)
    model(mx.array([PROMPT + emitted]), cache=fresh)
    assert prompt_cache[0].offset == fresh[0].offset
    ours, plain = (model(mx.array([[3]]), cache=cache) for cache in (prompt_cache, fresh))
    assert mx.allclose(ours, plain, rtol=0, atol=2e-5).item()
