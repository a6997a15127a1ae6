"""Ids that a target cannot embed, and logits that are not numbers, end in one line."""

import warnings

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.proposers import Stub, oracle
from support.runs import model_of, prompt_and_plain
from support.tiny import DENSE, HYBRID, SLIDING, VOCAB, make_model, make_tokenizer

from mlx_dflash2 import batch_generate, make_logits_processors, make_sampler, stream_generate
from mlx_dflash2.decode.stats import Stats
from mlx_dflash2.generate import dflash_generate_step


def decode(model, proposer, prompt, **options):
    steps = dflash_generate_step(mx.array(prompt), model, proposer, max_tokens=9, **options)
    return [token for token, _, _ in steps]


@settings(deadline=None)
@given(st.integers(0, 11), st.one_of(st.integers(VOCAB, 2**31 - 1), st.integers(-(2**31), -1)))
def test_prompts(place, token):
    prompt = [5] * 12
    prompt[place] = token
    with pytest.raises(ValueError, match=f"token {token} at place {place} but") as error:
        decode(model_of(DENSE), oracle(prompt), prompt)
    assert "\n" not in str(error.value)


def test_prompts_of_batches_and_texts():
    model, tokenizer = model_of(DENSE), make_tokenizer()
    with pytest.raises(ValueError, match=f"token {VOCAB} at place 1"):
        list(stream_generate(model, tokenizer, [3, VOCAB], 4, draft_model=oracle([3])))
    with pytest.raises(ValueError, match=f"token {VOCAB} at place 0"):
        batch_generate(model, tokenizer, [[3], [VOCAB]], draft_model=oracle([3]), max_tokens=3)


@pytest.mark.parametrize("wrong", [VOCAB, 2**31, 2**32 - 1])
@pytest.mark.parametrize("kind", [DENSE, HYBRID, SLIDING])
def test_drafts(kind, wrong):
    """The tokens are the target's, and drafting stops with a word."""
    prompt, plain = prompt_and_plain(kind, 20)
    proposer = Stub(lambda position, n: [wrong] * n)
    stats = Stats()
    with pytest.warns(UserWarning, match="tokens that the target does not have"):
        tokens = decode(model_of(kind), proposer, prompt, stats=stats)
    assert tokens == plain[:9] and stats.draft_failures == 1 and stats.accepted == 0


@pytest.mark.parametrize("sampler", [None, make_sampler(0.8)])
def test_biases(sampler):
    processors = make_logits_processors({3: 1.0, VOCAB: 2.0})
    with pytest.raises(ValueError, match=f"`logit_bias` names token {VOCAB} but") as error:
        decode(model_of(DENSE), oracle([3]), [3], sampler=sampler, logits_processors=processors)
    assert "\n" not in str(error.value)
    fine = make_logits_processors({3: 1.0}, repetition_penalty=1.1)
    assert len(decode(model_of(DENSE), oracle([3]), [3], logits_processors=fine)) == 9


def test_tokens_that_xtc_leaves_alone():
    sampler = make_sampler(0.8, xtc_probability=0.5, xtc_special_tokens=[VOCAB + 1])
    with pytest.raises(ValueError, match=f"`xtc_special_tokens` names token {VOCAB + 1}"):
        decode(model_of(DENSE), oracle([3]), [3], sampler=sampler)


def test_processors_and_samplers():
    def widens(tokens, logits):
        return mx.concatenate([logits, mx.full((1, 1), 99.0)], axis=-1)

    with pytest.raises(ValueError, match="gave rows of shape"):
        decode(model_of(DENSE), oracle([3]), [3], logits_processors=[widens])
    with pytest.raises(ValueError, match=f"chose token {VOCAB} but the target"):
        decode(model_of(DENSE), oracle([3]), [3], sampler=lambda row: mx.array([VOCAB]))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", [DENSE, HYBRID])
@pytest.mark.parametrize("sampler", [None, make_sampler(0.8), lambda row: mx.argmax(row, axis=-1)])
def test_a_target_whose_numbers_overflow(kind, sampler, value):
    """The target is named, not the drafter."""
    model = make_model(kind)
    norm = getattr(model, "language_model", model).model.norm
    norm.weight = mx.full(norm.weight.shape, value)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with pytest.raises(ValueError, match="The target's logits are not finite"):
            decode(model, oracle([3]), [3], sampler=sampler)


def test_a_target_that_overflows_in_mid_answer():
    """What was handed out before is right."""
    prompt, plain = prompt_and_plain(DENSE, 20)

    def breaks(tokens, logits):
        return logits if tokens.size < 25 else logits * float("nan")

    steps = dflash_generate_step(
        mx.array(prompt), model_of(DENSE), oracle(prompt + plain), logits_processors=[breaks]
    )
    tokens = []
    with pytest.raises(ValueError, match="not finite"):
        tokens.extend(token for token, _, _ in steps)
    assert tokens == plain[: len(tokens)] and len(tokens) < 6
