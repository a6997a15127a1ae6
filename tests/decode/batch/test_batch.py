"""Every prompt of a batch gives the tokens that it gives on its own, whatever its neighbours do."""

import random
import warnings
from functools import cache

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors as mlx_lm_processors
from support.proposers import PerRow, half, liar, oracle, rand
from support.runs import model_of, plain_of
from support.tiny import (
    CONFIGS,
    DENSE,
    HYBRID,
    SLIDING,
    VOCAB,
    drafter_config,
    make_drafter,
    make_model,
    make_tokenizer,
    plain_tokens,
)

from mlx_dflash2 import DFlashPromptCache, batch_generate, make_logits_processors, make_sampler
from mlx_dflash2.decode.stats import LOW_ACCEPTANCE_ROUNDS, Stats
from mlx_dflash2.generate import dflash_generate_step

FIXTURES = (DENSE, HYBRID, SLIDING, "llama-sliding", "gemma4_text-shared")
LENGTHS, BUDGETS = (20, 3, 33, 1, 16), (25, 24, 12, 1, 17)


@cache
def tokenizer_of(eos=None):
    return make_tokenizer(eos)


@cache
def prompts_and_plain(kind, bits=None):
    key = mx.random.key(9)
    prompts = [mx.random.randint(0, VOCAB, (n,), key=key).tolist() for n in LENGTHS]
    return prompts, [plain_of(kind, tuple(p), max(BUDGETS), bits) for p in prompts]


def stubs(prompts, plain, block=8):
    text = [p + t for p, t in zip(prompts, plain, strict=True)]
    makers = [
        lambda t: half(t, VOCAB, 1, block_size=block),
        lambda t: oracle(t, block_size=block),
        lambda t: liar(t, VOCAB, block_size=block),
        lambda t: oracle(t, block_size=block),
        lambda t: rand(7, VOCAB, block_size=block),
    ]
    return [make(t) for make, t in zip(makers, text, strict=False)]


def run(kind, prompts, proposer, max_tokens=24, eos=None, bits=None, **kwargs):
    """Answer prompts with whole blocks in every round, so that counts do not depend on times."""
    stats = Stats()
    kwargs.setdefault("verify_width", kwargs.get("block_size") or proposer.block_size)
    response = batch_generate(
        model_of(kind, bits),
        tokenizer_of(eos),
        prompts,
        max_tokens=max_tokens,
        draft_model=proposer,
        return_token_ids=True,
        stats=stats,
        **kwargs,
    )
    return response, stats


def cut(tokens, budget):
    return [t[:n] for t, n in zip(tokens, budget, strict=True)]


@pytest.mark.parametrize("size, block", [(1, 8), (2, 3), (5, 8)])
@pytest.mark.parametrize("kind", FIXTURES)
def test_rows_that_accept_and_finish_differently(kind, size, block):
    prompts, plain = (x[:size] for x in prompts_and_plain(kind))
    budgets = list(BUDGETS[:size])
    drafts = stubs(prompts, plain, block)
    response, stats = run(kind, prompts, PerRow(*drafts), budgets)
    assert response.token_ids == cut(plain, budgets)
    assert stats.generation_tokens == sum(budgets) == response.stats.generation_tokens
    assert stats.prefills == size and stats.prompt_tokens == sum(LENGTHS[:size])
    assert stats.accepted == sum(stats.accepted_at) and stats.drafted == sum(stats.drafted_at)
    assert 0 < stats.accepted < stats.drafted and stats.fallback is None
    # One pass serves every row: never more of them than the slowest row has rounds.
    assert max(d.calls for d in drafts) <= stats.passes < max(budgets)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
def test_every_kind_of_target(kind):
    vocab_size = CONFIGS[kind].get("vocab_size", VOCAB)
    for seed in range(5):
        draw = random.Random(seed)
        lengths = [draw.choice([1, 5, 15, 16, 17, 40]) for _ in range(4)]
        prompts = [[draw.randrange(vocab_size) for _ in range(n)] for n in lengths]
        budgets = [draw.randint(10, 40) for _ in lengths]
        plain = [plain_tokens(model_of(kind), p, 40) for p in prompts]
        texts = [p + t for p, t in zip(prompts, plain, strict=True)]
        proposer = PerRow(*(half(text, vocab_size, draw.randint(0, 6)) for text in texts))
        places = draw.choice([2, 3, 4])
        response, stats = run(kind, prompts, proposer, budgets, completion_batch_size=places)
        assert response.token_ids == cut(plain, budgets)
        assert stats.accepted > 0


def test_nobody_waits_for_the_row_that_accepts_least():
    prompts, plain = (x[1:3] for x in prompts_and_plain(DENSE))
    good, bad = stubs(*prompts_and_plain(DENSE))[1:3]
    response, stats = run(DENSE, prompts, PerRow(good, bad), [25, 25])
    assert response.token_ids == cut(plain, [25, 25])
    assert (good.calls, bad.calls) == (3, 23) and stats.passes == 24
    assert stats.accepted == stats.generation_tokens - stats.prefills - stats.bonus == 21


@pytest.mark.parametrize(
    "kind, bits",
    [(kind, None) for kind in (*FIXTURES, "qwen3_moe", "qwen3_5-conv2", "gpt_oss")]
    + [(DENSE, 4), (HYBRID, 4)],
)
def test_a_drafter(kind, bits):
    prompts, plain = prompts_and_plain(kind, bits)
    budgets = [12, 7, 10, 1, 9]
    response, stats = run(kind, prompts, make_drafter(), budgets, bits=bits)
    assert response.token_ids == cut(plain, budgets)
    assert stats.drafted > 0 and stats.fallback is None
    assert response.texts == [tokenizer_of().decode(t) for t in response.token_ids]


@pytest.mark.parametrize("kind", [DENSE, HYBRID, SLIDING])
def test_eos_tokens_end_their_own_row_only(kind):
    prompts, plain = (x[:3] for x in prompts_and_plain(kind))
    eos = plain[1][9]
    expected = [t[: t.index(eos)] if eos in t else t for t in cut(plain, [24] * 3)]
    response, stats = run(kind, prompts, PerRow(*stubs(prompts, plain)), eos=eos)
    assert response.token_ids == expected
    assert stats.generation_tokens == sum(len(t) + (len(t) < 24) for t in expected)


@pytest.mark.parametrize("kind", [DENSE, HYBRID, SLIDING])
def test_prompts_that_wait_for_a_place(kind):
    prompts, plain = prompts_and_plain(kind)
    proposer = PerRow(*stubs(prompts, plain))
    response, _ = run(kind, prompts, proposer, list(BUDGETS), completion_batch_size=2)
    assert response.token_ids == cut(plain, BUDGETS)


@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize(
    "kind, step", [(DENSE, "extend"), (HYBRID, "propose"), (SLIDING, "extend")]
)
def test_a_drafter_that_fails(kind, step, size):
    prompts, plain = (x[:size] for x in prompts_and_plain(kind))
    proposer, calls = PerRow(*stubs(prompts, plain)), []
    original = getattr(proposer, step)

    def fails_in_round_three(*args):
        calls.append(1)
        if len(calls) == 3 * size:
            raise RuntimeError("boom")
        return original(*args)

    setattr(proposer, step, fails_in_round_three)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # Places for fewer prompts than there are: some join after the failure.
        response, stats = run(kind, prompts, proposer, completion_batch_size=4)
    assert response.token_ids == cut(plain, [24] * size)
    assert stats.draft_failures == 1 and "boom" in stats.fallback and stats.accepted > 0
    assert len(caught) == 1 and len(calls) == 3 * size


def test_non_finite_drafts():
    prompts, plain = (x[:2] for x in prompts_and_plain(DENSE))
    drafts = stubs(prompts, plain)
    drafts[1].finite = False
    with pytest.warns(UserWarning, match="non-finite"):
        response, stats = run(DENSE, prompts, PerRow(*drafts))
    assert response.token_ids == cut(plain, [24] * 2) and stats.draft_failures == 1


@pytest.mark.parametrize("kind", [DENSE, HYBRID, SLIDING])
def test_draws_are_those_of_a_single_generation(kind):
    prompts = prompts_and_plain(kind)[0][:3]
    drafter, sampler = make_drafter(), make_sampler(temp=0.8, top_k=20)
    before = mx.random.state[0].tolist()
    response, stats = run(kind, prompts, drafter, 12, sampler=sampler, seed=5)
    assert mx.random.state[0].tolist() == before
    assert stats.rule == "rejection" and stats.drafted > 0
    for i, prompt in enumerate(prompts):
        steps = dflash_generate_step(
            mx.array(prompt), model_of(kind), drafter, sampler=sampler, seed=5 + i, max_tokens=12
        )
        assert response.token_ids[i] == [token for token, _, _ in steps]


def test_samplers_of_their_own():
    prompts, plain = (x[:3] for x in prompts_and_plain(DENSE))
    samplers = [None, make_sampler(temp=0.7), lambda logprobs: mx.argmin(logprobs, axis=-1)]
    response, _ = run(DENSE, prompts, make_drafter(), 10, sampler=samplers)
    steps = generate_step(mx.array(prompts[2]), model_of(DENSE), sampler=samplers[2], max_tokens=10)
    assert response.token_ids[0] == plain[0][:10] != response.token_ids[1]
    assert response.token_ids[2] == [token for token, _ in steps]


class NoRepeats:
    """Counts its calls and bans token 0 and what it has seen twice."""

    def __init__(self):
        self.calls = []

    def __call__(self, tokens, logits):
        self.calls.append(tokens.tolist())
        twice = [t for t in self.calls[-1] if self.calls[-1].count(t) > 1]
        return mx.put_along_axis(logits, mx.array([[0, *twice]]), mx.array(-mx.inf), axis=-1)


@pytest.mark.parametrize("kind", [DENSE, HYBRID])
def test_processors(kind):
    prompts, _ = (x[:3] for x in prompts_and_plain(kind))
    settings = dict(repetition_penalty=1.4, presence_penalty=0.5)
    counting = [NoRepeats() for _ in prompts]
    for processors in (
        make_logits_processors(**settings),
        mlx_lm_processors(**settings),
        [[c] for c in counting],
    ):
        response, stats = run(kind, prompts, make_drafter(), 10, logits_processors=processors)
        assert stats.drafted > 0
        for i, prompt in enumerate(prompts):
            own = [NoRepeats()] if processors[0] == [counting[0]] else processors
            steps = generate_step(
                mx.array(prompt), model_of(kind), logits_processors=own, max_tokens=10
            )
            assert response.token_ids[i] == [token for token, _ in steps]
            if own is not processors:
                assert counting[i].calls == own[0].calls[:10]


@pytest.mark.parametrize("kind", FIXTURES)
def test_logprobs_and_caches(kind):
    prompts, plain = (x[:3] for x in prompts_and_plain(kind))
    # The EOS token is a draft, and another that is right follows it.
    model, eos = model_of(kind), plain[1][10]
    response, _ = run(
        kind,
        prompts,
        PerRow(*stubs(prompts, plain)),
        [24, 18, 24],
        eos=eos,
        return_logprobs=True,
        return_prompt_caches=True,
    )
    for prompt, tokens, found, live in zip(
        prompts, response.token_ids, response.logprobs, response.caches, strict=True
    ):
        steps = generate_step(mx.array(prompt), model, max_tokens=len(tokens))
        expected = [row[token].item() for token, row in steps]
        assert found == pytest.approx(expected, abs=1e-4)
        stopped = len(tokens) not in (24, 18)
        fresh = make_prompt_cache(model)
        model(mx.array([prompt + tokens + [eos] * stopped]), cache=fresh)
        for step in ([3], [1, 2, 3], [4]):
            ours, theirs = (model(mx.array([step]), cache=c) for c in (live, fresh))
            assert mx.allclose(ours, theirs, rtol=0, atol=2e-5).item()
    assert response.token_ids[1] == plain[1][: plain[1].index(eos)]


@pytest.mark.parametrize("kind", FIXTURES)
def test_prompt_caches_are_used_and_left_alone(kind):
    prompts, plain = (x[:3:2] for x in prompts_and_plain(kind))
    model, caches = model_of(kind), []
    for prompt in prompts:
        caches.append(make_prompt_cache(model))
        model(mx.array([prompt[:7]]), cache=caches[-1])
    rest = [prompt[7:] for prompt in prompts]
    for _ in range(2):
        proposer = PerRow(*stubs(prompts, plain)[:2])
        response, stats = run(kind, rest, proposer, prompt_caches=caches)
        assert response.token_ids == cut(plain, [24] * 2)
        assert stats.cached_tokens == 14 and stats.prompt_tokens == sum(map(len, rest))


def test_a_conversation_s_cache_is_refused():
    model = model_of(DENSE)
    caches = [DFlashPromptCache(model, make_drafter())]
    with pytest.raises(ValueError, match=r"^`prompt_caches` holds a DFlashPromptCache[^\n]*$"):
        run(DENSE, [[1, 2]], make_drafter(), prompt_caches=caches)


def test_a_row_without_budget_returns_its_prompt_s_cache():
    model, prompts = model_of(DENSE), [[5, 6, 7, 8], [1, 2, 3]]
    response, _ = run(DENSE, prompts, make_drafter(), [0, 4], return_prompt_caches=True)
    assert [len(tokens) for tokens in response.token_ids] == [0, 4]
    fresh = make_prompt_cache(model)
    model(mx.array([prompts[0]]), cache=fresh)
    ours, theirs = (model(mx.array([[3]]), cache=c) for c in (response.caches[0], fresh))
    assert mx.allclose(ours, theirs, rtol=0, atol=2e-5).item()


def test_stats_say_which_kernels_ran():
    _, stats = run(DENSE, [[1, 2]], make_drafter(), [6])
    assert stats.kernels and "Plain MLX for" in stats.summary()


def test_low_acceptance_is_warned_about_once():
    prompts, plain = prompts_and_plain(DENSE)
    rows = [liar(p + t, VOCAB) for p, t in zip(prompts, plain, strict=True)]
    with pytest.warns(UserWarning, match="rarely accepted") as caught:
        _, stats = run(DENSE, prompts, PerRow(*rows), [24] * 5)
    assert sum("rarely accepted" in str(w.message) for w in caught) == 1
    assert stats.rounds > 2 * LOW_ACCEPTANCE_ROUNDS


def test_drafts_that_are_no_row_stop_drafting():
    prompts, plain = (x[:2] for x in prompts_and_plain(DENSE))
    rows = [oracle(p + t) for p, t in zip(prompts, plain, strict=True)]
    rule = rows[0].rule
    rows[0].rule = lambda position, n: [rule(position, n)]
    with pytest.warns(UserWarning, match=r"drafts have to be \[L\] but are \[1, "):
        response, stats = run(DENSE, prompts, PerRow(*rows), [24] * 2)
    assert response.token_ids == cut(plain, [24] * 2) and stats.draft_failures == 1


def test_without_a_drafter_it_is_mlx_lm():
    prompts, plain = (x[:3] for x in prompts_and_plain(DENSE))
    arguments = (model_of(DENSE), tokenizer_of(), prompts)
    ours, theirs = (
        f(*arguments, max_tokens=9, return_token_ids=True, return_logprobs=True)
        for f in (batch_generate, mlx_lm.batch_generate)
    )
    assert ours.texts == theirs.texts and ours.logprobs == theirs.logprobs
    assert ours.token_ids == theirs.token_ids == cut(plain, [9] * 3)


def test_nothing_to_do():
    proposer = PerRow(*stubs(*prompts_and_plain(DENSE)))
    assert run(DENSE, [], proposer)[0].texts == []
    response, stats = run(DENSE, [[1, 2], [3]], proposer, 0)
    assert response.token_ids == [[], []] and stats.generation_tokens == 0


def test_a_row_of_text_and_the_progress(capsys):
    prompts, plain = (x[:2] for x in prompts_and_plain(DENSE))
    texts = [tokenizer_of().decode(prompts[0]), prompts[1]]
    response, stats = run(DENSE, texts, PerRow(*stubs(prompts, plain)), 9, verbose=True)
    assert response.token_ids == cut(plain, [9] * 2)
    out = capsys.readouterr().out
    assert "Finished processing 2/2" in out and stats.summary().splitlines()[0] in out


REFUSED = {
    "QuantizedKVCache": lambda: [QuantizedKVCache(group_size=32) for _ in range(4)],
    "keeps its first 4 rows": lambda: [RotatingKVCache(40, keep=4) for _ in range(4)],
    "prompt 1": lambda: [RotatingKVCache(40 + i // 2) for i in range(4)],
}


@pytest.mark.parametrize("words", REFUSED)
def test_caches_that_are_refused(words):
    caches = [[KVCache() for _ in range(4)], REFUSED[words]()]
    with pytest.raises(ValueError, match=words) as error:
        run(DENSE, [[1, 2], [3]], make_drafter(), prompt_caches=caches)
    assert "\n" not in str(error.value) and all(cache.empty() for cache in caches[0])


@pytest.mark.parametrize(
    "kwargs",
    [
        dict(max_tokens=[1, 2, 3]),
        dict(max_tokens=[1, -2]),
        dict(sampler=[None]),
        dict(prompt_caches=[[]]),
        dict(completion_batch_size=0),
        dict(prefill_step_size=0),
        dict(block_size=9),
    ],
    ids=str,
)
def test_arguments_that_are_refused(kwargs):
    with pytest.raises(ValueError, match=f"`{next(iter(kwargs))}`") as error:
        run(DENSE, [[1, 2], [3]], make_drafter(), **kwargs)
    assert "\n" not in str(error.value)


def test_a_rotation_that_cannot_be_batched():
    from mlx_lm.models.rope_utils import DynamicNTKScalingRoPE

    model = make_model("llama")
    model.model.layers[0].self_attn.rope = DynamicNTKScalingRoPE(32, 64, False, 1e4, 2.0)
    with pytest.raises(ValueError, match="DynamicNTKScalingRoPE"):
        batch_generate(model, tokenizer_of(), [[1], [2]], draft_model=make_drafter())


def test_an_interrupt_leaves_nothing_behind():
    prompts, plain = (x[:2] for x in prompts_and_plain(HYBRID))

    def interrupts(tokens, logits):
        if tokens.size > 30:
            raise KeyboardInterrupt
        return logits

    drafter = make_drafter()
    with pytest.raises(KeyboardInterrupt):
        run(HYBRID, prompts, drafter, logits_processors=[interrupts])
    assert run(HYBRID, prompts, drafter)[0].token_ids == cut(plain, [24] * 2)


def test_a_drafter_whose_rotation_takes_one_position():
    from mlx_dflash2.drafter.args import DrafterArgs
    from mlx_dflash2.drafter.model import Drafter

    rope = {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 2.0}
    config = drafter_config() | {"rope_parameters": rope | {"max_position_embeddings": 64}}
    prompts, plain = (x[:2] for x in prompts_and_plain(DENSE))
    response, stats = run(DENSE, prompts, Drafter(DrafterArgs.from_dict(config)), 6)
    assert response.token_ids == cut(plain, [6] * 2)
    assert stats.drafted > 0 and stats.fallback is None
