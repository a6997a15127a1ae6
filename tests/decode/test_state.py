"""However a generation ends, the caller's caches cover exactly the prompt and what was emitted."""

from functools import cache

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from support.proposers import half, oracle
from support.runs import model_of, prompt_and_plain, steps_of
from support.tiny import DENSE, HYBRID, SLIDING, VOCAB, make_drafter, make_tokenizer, plain_tokens

from mlx_dflash2.decode.rollback import num_cached
from mlx_dflash2.generate import stream_generate
from mlx_dflash2.targets.base import Target

KINDS = (DENSE, HYBRID, "qwen3_5-conv2", SLIDING, "llama-sliding", "gemma4_text-shared")
LENGTHS = (1, 16, 40)


STEPS = ([3], [1, 2, 3], [4])


@cache
def logits_after(kind, tokens):
    """What follows a fresh prefill of the tokens, in steps."""
    fresh = make_prompt_cache(model_of(kind))
    model_of(kind)(mx.array([tokens]), cache=fresh)
    return [model_of(kind)(mx.array([step]), cache=fresh) for step in STEPS]


def assert_covers(kind, prompt_cache, tokens):
    """The live cache goes on exactly as a fresh prefill of the same tokens would."""
    assert num_cached(prompt_cache) == len(tokens)
    for step, theirs in zip(STEPS, logits_after(kind, tuple(tokens)), strict=True):
        ours = model_of(kind)(mx.array([step]), cache=prompt_cache)
        assert mx.allclose(ours, theirs, rtol=0, atol=2e-5).item()


def fresh_cache(kind):
    return make_prompt_cache(model_of(kind))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_closing_at_every_yield(kind, length):
    prompt, plain = prompt_and_plain(kind, length)
    for proposer in (oracle(prompt + plain), half(prompt + plain, VOCAB, 3)):
        for stop in (1, 2, 3, 4, 5, 8, 9, 10, 13):
            prompt_cache = make_prompt_cache(model_of(kind))
            steps = steps_of(kind, prompt, proposer, prompt_cache, max_tokens=40)
            tokens = [next(steps)[0] for _ in range(stop)]
            steps.close()
            assert_covers(kind, prompt_cache, prompt + tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_ending_at_every_budget(kind):
    prompt, plain = prompt_and_plain(kind, 16)
    for max_tokens in (0, 1, 2, 3, 7, 8, 9, 10):
        for proposer in (oracle(prompt + plain), make_drafter()):
            prompt_cache = make_prompt_cache(model_of(kind))
            list(steps_of(kind, prompt, proposer, prompt_cache, max_tokens=max_tokens))
            assert_covers(kind, prompt_cache, prompt + plain[:max_tokens])


@pytest.mark.parametrize("length", [1, 16, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_a_second_turn_equals_a_cold_run(kind, length):
    """The turn after an EOS at each place of a block processes only its own tokens."""
    prompt, plain = prompt_and_plain(kind, length)
    more = [9, 8, 7]
    for stop in (1, 2, 5, 9):
        prompt_cache = make_prompt_cache(model_of(kind))
        first = steps_of(kind, prompt, oracle(prompt + plain), prompt_cache, max_tokens=40)
        tokens = [next(first)[0] for _ in range(stop)]
        first.close()
        whole = prompt + tokens + more
        cold = plain_tokens(model_of(kind), whole, 12)
        second = steps_of(kind, more, half(whole + cold, VOCAB, 2), prompt_cache, max_tokens=12)
        assert [token for token, _, _ in second] == cold
        assert_covers(kind, prompt_cache, whole + cold)


@pytest.mark.parametrize("eos_index", [1, 2, 5, 7, 8, 9, 11])
@pytest.mark.parametrize("kind", (DENSE, HYBRID, SLIDING))
def test_text_that_ends_with_eos_in_mid_block(kind, eos_index):
    """A token that the plain run emits is declared EOS, wherever it falls in a block."""
    prompt, plain = prompt_and_plain(kind, 16)
    eos = plain[eos_index]
    end = plain.index(eos) + 1
    prompt_cache = make_prompt_cache(model_of(kind))
    responses = stream_generate(
        model_of(kind), make_tokenizer(eos), prompt, max_tokens=40,
        draft_model=oracle(prompt + plain), prompt_cache=prompt_cache,
    )  # fmt: skip
    tokens = [response.token for response in responses]
    assert tokens == plain[:end]
    assert_covers(kind, prompt_cache, prompt + tokens)


class Interrupt:
    """Raises an error at the n-th layer that a target runs from now on."""

    def __init__(self, monkeypatch, error, after):
        original, self.count = Target.forward, 0

        def forward(target, tokens, cache, *args, **kwargs):
            run_layer = target.run_layer

            def counted(*layer_args):
                self.count += 1
                if self.count == after:
                    raise error
                return run_layer(*layer_args)

            target.run_layer = counted
            try:
                return original(target, tokens, cache, *args, **kwargs)
            finally:
                target.run_layer = run_layer

        monkeypatch.setattr(Target, "forward", forward)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("out of memory")], ids=repr)
@pytest.mark.parametrize("kind", (DENSE, "llama-sliding"))
def test_an_interruption_in_any_layer(kind, error, monkeypatch):
    prompt, plain = prompt_and_plain(kind, 16)
    for after in range(1, 30, 2):
        prompt_cache = make_prompt_cache(model_of(kind))
        with monkeypatch.context() as patch:
            Interrupt(patch, error, after)
            steps = steps_of(
                kind, prompt, half(prompt + plain, VOCAB, 2), prompt_cache,
                max_tokens=40, prefill_step_size=7,
            )  # fmt: skip
            tokens, processed = [], []
            with pytest.raises(type(error)):
                for token, _, _ in steps:
                    tokens.append(token)
        processed = prompt if tokens else prompt[: num_cached(prompt_cache)]
        assert len(processed) in (0, 7, 14, 15, 16)
        if processed:
            assert_covers(kind, prompt_cache, processed + tokens)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1)], ids=repr)
@pytest.mark.parametrize("call", range(1, 6))
@pytest.mark.parametrize("kind", (DENSE, HYBRID, SLIDING))
def test_an_interruption_while_the_drafter_takes_rows_in(kind, call, error):
    """It comes between two rounds, where the caches have been settled and the anchor moves on."""
    prompt, plain = prompt_and_plain(kind, 16)
    proposer, prompt_cache, tokens = half(prompt + plain, VOCAB, 2), fresh_cache(kind), []
    original, calls = proposer.extend, []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == call:
            raise error
        return original(*args)

    proposer.extend = interrupted
    with pytest.raises(type(error)):
        for token, _, _ in steps_of(kind, prompt, proposer, prompt_cache, prefill_step_size=8):
            tokens.append(token)
    covered = prompt + tokens if tokens else prompt[: num_cached(prompt_cache)]
    assert_covers(kind, prompt_cache, covered)


def test_a_cache_that_cannot_be_made_right_is_emptied(monkeypatch):
    """Interrupted again while closing: an empty list fails loudly, a wrong cache would not."""
    prompt, plain = prompt_and_plain(DENSE, 5)
    prompt_cache = make_prompt_cache(model_of(DENSE))
    steps = steps_of(DENSE, prompt, oracle(prompt + plain), prompt_cache)
    next(steps)
    Interrupt(monkeypatch, KeyboardInterrupt(), 1)
    with pytest.raises(KeyboardInterrupt):
        steps.close()
    assert prompt_cache == []


def test_a_cache_written_by_mlx_lm_is_gone_on_from():
    """The drafter starts cold, at the right position."""
    model = model_of(HYBRID)
    prompt, plain = prompt_and_plain(HYBRID, 40)
    prompt_cache, seen = make_prompt_cache(model), []
    model(mx.array([prompt[:30]]), cache=prompt_cache)
    proposer = oracle(prompt + plain)
    original = proposer.extend
    proposer.extend = lambda *args: (seen.append(args[3]), original(*args))
    steps = steps_of(HYBRID, prompt[30:], proposer, prompt_cache, max_tokens=12)
    assert [token for token, _, _ in steps] == plain[:12]
    assert seen[0] == 30 and proposer.calls == 2
