"""Text, counts and finish reasons are those of mlx_lm.stream_generate."""

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.generate import GenerationResponse
from mlx_lm.models.cache import make_prompt_cache
from support.proposers import half, oracle
from support.tiny import DENSE, HYBRID, VOCAB, make_model, make_tokenizer, plain_tokens

import mlx_dflash2
from mlx_dflash2 import Stats
from mlx_dflash2.decode.rollback import num_cached
from mlx_dflash2.generate import generate, stream_generate

PROMPT = list(range(5, 25))
FIELDS = ("text", "token", "prompt_tokens", "generation_tokens", "finish_reason")


def fields(responses):
    return [tuple(getattr(response, name) for name in FIELDS) for response in responses]


@pytest.fixture(scope="module", params=[DENSE, HYBRID])
def case(request):
    model = make_model(request.param)
    return model, plain_tokens(model, PROMPT, 40)


@pytest.mark.parametrize("max_tokens", [1, 2, 7, 8, 9, 17, 30])
@pytest.mark.parametrize("eos_index", [None, 0, 1, 4, 7, 8, 9])
def test_responses_equal_mlx_lms(case, eos_index, max_tokens):
    """Also where EOS and the last token fall on one another."""
    model, plain = case
    tokenizer = make_tokenizer(None if eos_index is None else plain[eos_index])
    expected = fields(mlx_lm.stream_generate(model, tokenizer, PROMPT, max_tokens=max_tokens))
    for proposer in (oracle(PROMPT + plain), half(PROMPT + plain, VOCAB, 2)):
        ours = list(stream_generate(model, tokenizer, PROMPT, max_tokens, draft_model=proposer))
        assert fields(ours) == expected
        assert all(type(response) is GenerationResponse for response in ours)
        assert all(response.peak_memory > 0 and response.prompt_tps > 0 for response in ours)


def test_from_draft_marks_the_accepted_drafts(case):
    model, plain = case
    stats = Stats()
    responses = list(
        stream_generate(
            model, make_tokenizer(), PROMPT, 20,
            draft_model=half(PROMPT + plain, VOCAB, 2), stats=stats, verify_width=8,
        )
    )  # fmt: skip
    assert [r.from_draft for r in responses[:7]] == [False, True, True, False, True, True, False]
    assert sum(r.from_draft for r in responses) == stats.accepted
    assert stats.generation_tokens == responses[-1].generation_tokens == 20


@pytest.mark.parametrize("prompt", [PROMPT, mx.array(PROMPT), " ".join(f"w{i}" for i in PROMPT)])
def test_prompts_as_text_list_and_array(case, prompt):
    model, plain = case
    tokenizer, proposer = make_tokenizer(), oracle(PROMPT + plain)
    text = generate(model, tokenizer, prompt, max_tokens=9, draft_model=proposer)
    assert text == mlx_lm.generate(model, tokenizer, prompt, max_tokens=9)


def test_without_a_drafter_it_is_mlx_lm(case):
    model, _ = case
    tokenizer = make_tokenizer()
    ours = fields(stream_generate(model, tokenizer, PROMPT, 9, max_kv_size=64))
    assert ours == fields(mlx_lm.stream_generate(model, tokenizer, PROMPT, 9, max_kv_size=64))
    assert generate(model, tokenizer, PROMPT, max_tokens=9) == mlx_lm.generate(
        model, tokenizer, PROMPT, max_tokens=9
    )


def test_max_tokens_zero_is_refused_as_in_mlx_lm(case):
    model, _ = case
    for draft_model in (None, oracle(PROMPT)):
        with pytest.raises(ValueError, match="non-zero"):
            list(stream_generate(model, make_tokenizer(), PROMPT, 0, draft_model=draft_model))


def test_no_limit_ends_at_eos(case):
    model, plain = case
    tokenizer = make_tokenizer(plain[25])
    responses = stream_generate(model, tokenizer, PROMPT, -1, draft_model=oracle(PROMPT + plain))
    assert [r.token for r in responses] == plain[: plain.index(plain[25]) + 1]


@pytest.mark.parametrize("max_tokens, eos_index", [(9, None), (30, 4), (30, 7)])
def test_the_caches_are_right_when_the_last_response_comes(case, max_tokens, eos_index):
    """A caller who stops at the finish reason and keeps the generator may go on with the cache."""
    model, plain = case
    tokenizer = make_tokenizer(None if eos_index is None else plain[eos_index])
    prompt_cache, stats, tokens = make_prompt_cache(model), Stats(), []
    responses = stream_generate(
        model, tokenizer, PROMPT, max_tokens, draft_model=oracle(PROMPT + plain),
        prompt_cache=prompt_cache, stats=stats,
    )  # fmt: skip
    for response in responses:
        tokens.append(response.token)
        if response.finish_reason is not None:
            break
    assert stats.generation_tokens == len(tokens) == response.generation_tokens
    whole = [*PROMPT, *tokens, 9, 8]
    second = stream_generate(
        model, make_tokenizer(), [9, 8], 5, draft_model=oracle(whole), prompt_cache=prompt_cache
    )
    assert [r.token for r in second] == plain_tokens(model, whole, 5)
    responses.close()
    assert num_cached(prompt_cache) == len(whole) + 5


def test_options_that_need_a_drafter_are_refused_without_one(case):
    model, _ = case
    with pytest.raises(ValueError, match="`stop` needs a `draft_model`"):
        list(stream_generate(model, make_tokenizer(), PROMPT, 9, stop="w1"))
    with pytest.raises(ValueError, match="`stats` needs a `draft_model`"):
        generate(model, make_tokenizer(), PROMPT, stats=Stats())


def test_unknown_options_are_an_error(case):
    model, _ = case
    with pytest.raises(TypeError, match="num_draft_tokens"):
        list(
            stream_generate(
                model, make_tokenizer(), PROMPT, draft_model=oracle(PROMPT), num_draft_tokens=3
            )
        )


def test_verbose_prints_text_on_stdout_and_the_summary_on_stderr(case, capsys):
    model, plain = case
    text = generate(
        model, make_tokenizer(), PROMPT, verbose=True, max_tokens=9,
        draft_model=oracle(PROMPT + plain),
    )  # fmt: skip
    out, err = capsys.readouterr()
    assert out == text + "\n"
    assert "Generation: 9 tokens" in err and "Acceptance by position: 1.00" in err


def test_progress_of_the_prompt(case):
    model, plain = case
    calls = []
    steps = mlx_dflash2.stream_generate(
        model, make_tokenizer(), PROMPT, 2, draft_model=oracle(PROMPT + plain),
        prefill_step_size=8, prompt_progress_callback=lambda *call: calls.append(call),
    )  # fmt: skip
    list(steps)
    assert calls == [(0, 20), (8, 20), (16, 20), (19, 20), (20, 20)]
