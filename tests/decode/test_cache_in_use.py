"""A prompt cache that an open generator works on cannot be used by anybody else."""

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.models.cache import KVCache, make_prompt_cache, save_prompt_cache, trim_prompt_cache
from support.proposers import half
from support.runs import model_of, prompt_and_plain
from support.tiny import DENSE, HYBRID, SLIDING, VOCAB, make_tokenizer, plain_tokens

from mlx_dflash2 import DFlashPromptCache, batch_generate, stream_generate
from mlx_dflash2.decode.rollback import num_cached
from mlx_dflash2.decode.session import IN_USE

KINDS = (DENSE, SLIDING, HYBRID, "quantized")
MORE = [9, 8, 7]


def begin(kind, conversation=False):
    """A cache, the generator that works on it, and what was handed out so far."""
    options = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 4}
    options = options if kind == "quantized" else {}
    kind = DENSE if kind == "quantized" else kind
    model = model_of(kind)
    prompt, plain = prompt_and_plain(kind, 37)
    proposer = half(prompt + plain, VOCAB, 5)
    cache = DFlashPromptCache(model, proposer) if conversation else make_prompt_cache(model)
    steps = stream_generate(
        model, make_tokenizer(), prompt, 30, draft_model=proposer, prompt_cache=cache, **options
    )
    tokens = [next(steps).token for _ in range(3)]
    return model, proposer, cache, steps, prompt + tokens, options


def answer(model, proposer, cache, **options):
    tokenizer = make_tokenizer()
    steps = stream_generate(
        model, tokenizer, MORE, 8, draft_model=proposer, prompt_cache=cache, **options
    )
    return [step.token for step in steps]


@pytest.mark.parametrize("conversation", [False, True], ids=["list", "conversation"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_second_use_is_refused_and_the_first_goes_on(kind, conversation):
    model, proposer, cache, steps, whole, options = begin(kind, conversation)
    with pytest.raises(ValueError) as error:
        answer(model, proposer, cache, **options)
    assert str(error.value) == IN_USE
    whole.append(next(steps).token)
    steps.close()
    assert num_cached(cache.caches if conversation else cache) == len(whole)
    tokens = answer(model, proposer, cache, **options)
    if kind != "quantized":
        assert tokens == plain_tokens(model, whole + MORE, 8)


@pytest.mark.parametrize("kind", KINDS[:3])
def test_mlx_lm_cannot_use_it_either(kind, tmp_path):
    model, _, cache, steps, whole, _ = begin(kind)
    uses = [
        lambda: next(mlx_lm.stream_generate(model, make_tokenizer(), MORE, prompt_cache=cache)),
        lambda: trim_prompt_cache(cache, 1),
        lambda: save_prompt_cache(str(tmp_path / "cache.safetensors"), cache),
        lambda: batch_generate(model, make_tokenizer(), [MORE], prompt_caches=[cache]),
    ]
    for use in uses:
        with pytest.raises((RuntimeError, ValueError), match="in use by a generator"):
            use()
    steps.close()
    assert num_cached(cache) == len(whole)


def test_a_batch_refuses_it():
    model, proposer, cache, steps, *_ = begin(DENSE)
    with pytest.raises(ValueError, match="in use by a generator"):
        batch_generate(model, make_tokenizer(), [MORE], draft_model=proposer, prompt_caches=[cache])
    steps.close()


def test_a_conversation_cannot_go_back_or_be_saved(tmp_path):
    _, _, cache, steps, whole, _ = begin(DENSE, conversation=True)
    for use in (lambda: cache.reuse(MORE), lambda: cache.save(tmp_path / "cache.safetensors")):
        with pytest.raises(ValueError, match="in use by a generator"):
            use()
    steps.close()
    assert len(cache) == len(whole) and cache.reuse(whole + MORE).tolist() == MORE


def test_closing_leaves_alone_what_the_caller_put_into_the_list():
    model, _, cache, steps, *_ = begin(DENSE)
    fresh = make_prompt_cache(model)
    cache[:] = fresh
    model(mx.array([MORE]), cache=cache)
    steps.close()
    assert all(a is b for a, b in zip(cache, fresh, strict=True))
    assert num_cached(cache) == len(MORE) and isinstance(cache[0], KVCache)


def test_a_generator_that_is_dropped_gives_it_back():
    _, _, cache, steps, whole, _ = begin(DENSE)
    del steps
    assert num_cached(cache) == len(whole)
