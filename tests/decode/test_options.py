"""mlx-lm's generation options, each against plain mlx-lm with the same option."""

from functools import cache, partial

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors as mlx_lm_processors
from mlx_lm.sample_utils import make_sampler as mlx_lm_sampler
from support.proposers import Stub, half, oracle
from support.runs import model_of, plain_of, run
from support.tiny import DENSE, HYBRID, SLIDING, VOCAB, cache_arrays, make_drafter, make_model

from mlx_dflash2 import DFlashPromptCache, make_logits_processors, make_sampler
from mlx_dflash2.drafter.model import Proposal
from mlx_dflash2.generate import dflash_generate_step

KINDS = (DENSE, HYBRID, SLIDING)
PROMPT = list(range(5, 25))


def greedy(kind):
    return plain_of(kind, tuple(PROMPT))


def plain(kind, max_tokens=20, **options):
    steps = generate_step(mx.array(PROMPT), model_of(kind), max_tokens=max_tokens, **options)
    return [token for token, _ in steps]


def drafted(kind, proposer, max_tokens=20, **options):
    steps, stats = run(kind, PROMPT, proposer, max_tokens, **options)
    return [token for token, _ in steps], stats


def proposers(continuation):
    text = PROMPT + continuation
    return [oracle(text), half(text, VOCAB, 2), make_drafter()]


PENALTIES = {
    "bias": dict(logit_bias={7: 3.0, 9: -3.0}),
    "repetition": dict(repetition_penalty=3.0, repetition_context_size=12),
    "presence": dict(presence_penalty=0.8, presence_context_size=12),
    "frequency": dict(frequency_penalty=0.5, frequency_context_size=40),
    "all": dict(
        logit_bias={7: 3.0}, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3
    ),
}


@cache
def penalised(kind, name, count):
    return plain(kind, count, logits_processors=mlx_lm_processors(**PENALTIES[name]))


@pytest.mark.parametrize("pure", [True, False], ids=["ahead", "row by row"])
@pytest.mark.parametrize("name", PENALTIES)
@pytest.mark.parametrize("kind", KINDS)
def test_penalties(kind, name, pure):
    settings = PENALTIES[name]
    count = 32
    expected = penalised(kind, name, count)
    assert expected != plain_of(kind, tuple(PROMPT), count)
    make = make_logits_processors if pure else mlx_lm_processors
    for proposer in proposers(expected):
        tokens, stats = drafted(kind, proposer, count, logits_processors=make(**settings))
        assert tokens == expected
        assert (stats.row_by_row is None) == pure
        assert stats.drafted > 0


class Counter:
    """A stateful processor: it remembers every call and bans what it has seen twice."""

    def __init__(self):
        self.calls = []

    def __call__(self, tokens, logits):
        tokens = tokens.tolist()
        self.calls.append(tokens)
        banned = [t for t in set(tokens) if tokens.count(t) > 1] + [len(self.calls) % VOCAB]
        return logits.at[:, mx.array(banned)].add(-1e3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stateful_processor_sees_what_mlx_lm_would_show_it(kind):
    """Called once for every emitted token, with the prompt and exactly the tokens before it."""
    theirs = Counter()
    expected = plain(kind, logits_processors=[theirs])
    for proposer in proposers(expected):
        ours = Counter()
        tokens, stats = drafted(kind, proposer, logits_processors=[ours])
        assert tokens == expected
        assert ours.calls == [PROMPT + expected[:i] for i in range(len(expected))]
        assert "Counter" in stats.row_by_row


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("after", [1, 2, 4, 5, 8])
def test_an_exception_in_a_processor_leaves_an_exact_cache(kind, after):
    class Fails(Counter):
        def __call__(self, tokens, logits):
            if len(self.calls) == after:
                raise ZeroDivisionError
            return super().__call__(tokens, logits)

    continuation = plain(kind, logits_processors=[Counter()])
    prompt_cache, emitted = make_prompt_cache(model_of(kind)), []
    steps = dflash_generate_step(
        mx.array(PROMPT), model_of(kind), half(PROMPT + continuation, VOCAB, 3),
        logits_processors=[Fails()], prompt_cache=prompt_cache,
    )  # fmt: skip
    with pytest.raises(ZeroDivisionError):
        for token, _, _ in steps:
            emitted.append(token)
    assert emitted == continuation[: len(emitted)] and after - 4 <= len(emitted) <= after
    fresh, step = make_prompt_cache(model_of(kind)), mx.array([[3]])
    model_of(kind)(mx.array([PROMPT + emitted]), cache=fresh)
    ours, theirs = (model_of(kind)(step, cache=c) for c in (prompt_cache, fresh))
    assert mx.allclose(ours, theirs, atol=2e-5).item()


@pytest.mark.parametrize("ahead", [True, False])
def test_logprobs_are_those_after_the_processors(ahead):
    settings = PENALTIES["all"]
    processors = mlx_lm_processors(**settings)
    steps = generate_step(
        mx.array(PROMPT), model_of(DENSE), max_tokens=12, logits_processors=processors
    )
    theirs = [(token, row) for token, row in steps]
    make = make_logits_processors if ahead else mlx_lm_processors
    ours = dflash_generate_step(
        mx.array(PROMPT), model_of(DENSE), oracle(PROMPT + [t for t, _ in theirs]),
        max_tokens=12, logits_processors=make(**settings),
    )  # fmt: skip
    for (token, row, _), (their_token, their_row) in zip(ours, theirs, strict=True):
        assert token == their_token and mx.allclose(row, their_row, atol=1e-5).item()


SETTINGS = {
    "temperature": dict(temp=0.8),
    "top_p": dict(temp=1.0, top_p=0.9),
    "top_k": dict(temp=0.7, top_k=20),
    "min_p": dict(temp=1.0, min_p=0.05, min_tokens_to_keep=3),
    "xtc": dict(temp=1.0, xtc_probability=0.5, xtc_threshold=0.05, xtc_special_tokens=[3]),
    "everything": dict(temp=0.9, top_p=0.95, top_k=50, min_p=0.01, xtc_probability=0.3),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_opaque_sampler_draws_what_it_would_draw_in_mlx_lm(kind, name):
    """Coupled: with the same global seed the very tokens of plain mlx-lm come out."""
    # Making it draws, too.
    model_of(kind)
    mx.random.seed(11)
    expected = plain(kind, 12, sampler=mlx_lm_sampler(**SETTINGS[name]))
    for proposer in proposers(expected):
        mx.random.seed(11)
        tokens, stats = drafted(kind, proposer, 12, sampler=mlx_lm_sampler(**SETTINGS[name]))
        assert tokens == expected
        assert stats.rule == "coupled" and stats.row_by_row == "the sampler"


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_rejection_runs_with_every_setting(kind, name):
    sampler = make_sampler(**SETTINGS[name])
    for proposer in (oracle(PROMPT + greedy(kind)), make_drafter()):
        tokens, stats = drafted(kind, proposer, 12, sampler=sampler, seed=3)
        assert len(tokens) == 12 and stats.rule == "rejection" and stats.row_by_row is None
        again, _ = drafted(kind, proposer, 12, sampler=sampler, seed=3)
        other, _ = drafted(kind, proposer, 12, sampler=sampler, seed=4)
        assert again == tokens != other


@pytest.mark.parametrize(
    "settings",
    [dict(top_k=1), dict(top_p=1e-4), dict(min_p=1.0)],
    ids=["top_k 1", "top_p 1e-4", "min_p 1"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_distribution_of_one_token_is_greedy(kind, settings):
    expected = greedy(kind)
    for proposer in proposers(expected):
        for processors in (None, [lambda tokens, logits: logits]):
            tokens, stats = drafted(
                kind, proposer, sampler=make_sampler(temp=1.0, **settings),
                logits_processors=processors,
            )  # fmt: skip
            assert tokens == expected and stats.rule == "rejection"


def test_temperature_zero_is_greedy():
    expected = greedy(DENSE)
    for sampler in (None, make_sampler(), make_sampler(top_k=5), mlx_lm_sampler(0.0)):
        tokens, stats = drafted(DENSE, oracle(PROMPT + expected), sampler=sampler)
        assert tokens == expected and stats.rule == "greedy"


def test_a_seed_leaves_the_global_state_alone():
    sampler = make_sampler(temp=1.0, top_p=0.9, xtc_probability=0.5)
    mx.random.seed(5)
    expected = mx.random.uniform().item()
    mx.random.seed(5)
    drafted(DENSE, oracle(PROMPT), sampler=sampler, seed=1)
    assert mx.random.uniform().item() == expected


def test_without_a_seed_the_global_one_decides():
    sampler, runs = make_sampler(temp=1.0), []
    for seed in (1, 1, 2):
        mx.random.seed(seed)
        runs.append(drafted(DENSE, oracle(PROMPT), sampler=sampler)[0])
    assert runs[0] == runs[1] != runs[2]


def test_a_seed_for_a_sampler_that_draws_by_itself_is_refused():
    with pytest.raises(ValueError, match=r"`seed` is 3 .* mx\.random"):
        drafted(DENSE, make_drafter(), sampler=mlx_lm_sampler(0.7), seed=3)
    expected = greedy(DENSE)
    assert drafted(DENSE, make_drafter(), seed=3)[0] == expected


def test_sessions_belong_to_their_model():
    session = DFlashPromptCache(make_model(DENSE, seed=1), make_drafter())
    with pytest.raises(ValueError, match="another model object"):
        drafted(DENSE, make_drafter(), prompt_cache=session)
    with pytest.warns(UserWarning, match="`max_kv_size` has no effect"):
        DFlashPromptCache(model_of(HYBRID), make_drafter(), max_kv_size=8)


def test_processors_see_ids_as_mlx_lm_shows_them():
    """Of a type that can be subtracted from."""
    seen = []
    for generate in (plain, partial(drafted, proposer=oracle(PROMPT))):
        dtypes = []
        generate(DENSE, logits_processors=[lambda tokens, x, d=dtypes: d.append(tokens.dtype) or x])
        seen.append(dtypes[:5])
    assert seen[0] == seen[1]


def test_seeded_generators_are_independent_of_each_other():
    drafter = make_drafter()
    options = dict(sampler=make_sampler(temp=1.0), max_tokens=25)

    def steps(seed):
        return dflash_generate_step(
            mx.array(PROMPT), model_of(DENSE), drafter, seed=seed, **options
        )

    alone = [[token for token, _, _ in steps(seed)] for seed in (1, 2)]
    together = [(a[0], b[0]) for a, b in zip(steps(1), steps(2), strict=True)]
    assert [[a for a, _ in together], [b for _, b in together]] == alone


class Mirror(Stub):
    """Drafts what the target would draw, one token after the other, and says from what."""

    def propose(self, target, anchor, context, block_size, temperature=0.0, key=None):
        tokens = [context.tokens[i] for i in range(context.offset)] + anchor.tolist()
        drafts, rows = [], []
        for _ in range(block_size - 1):
            out = target.forward(mx.array([tokens + drafts]), target.make_cache())
            rows.append(mx.softmax(target.logits(out.hidden)[0, -1] / temperature))
            key, subkey = mx.random.split(key)
            drafts.append(mx.random.categorical(mx.log(rows[-1]), key=subkey).item())
        candidates = mx.broadcast_to(mx.arange(VOCAB, dtype=mx.uint32), (len(rows), VOCAB))
        return Proposal(mx.array(drafts, mx.uint32), mx.array(True), candidates, mx.stack(rows))


@pytest.mark.parametrize("temp", [0.1, 0.7, 1.5])
def test_drafts_from_the_targets_own_distribution_are_accepted(temp):
    sampler = make_sampler(temp=temp)
    _, stats = drafted(DENSE, Mirror(None, block_size=4), 60, sampler=sampler, seed=1)
    assert stats.accepted >= 0.99 * stats.drafted > 40


@pytest.mark.parametrize("start", [0, 10, 27, 5000])
@pytest.mark.parametrize("bits, group_size", [(4, 32), (8, 32)])
@pytest.mark.parametrize("kind", (DENSE, HYBRID))
def test_a_quantised_cache(kind, bits, group_size, start):
    """Also where the conversion falls due in the middle of the run."""
    options = dict(kv_bits=bits, kv_group_size=group_size, quantized_kv_start=start)
    expected = plain(kind, **options)
    for proposer in proposers(expected):
        prompt_cache = make_prompt_cache(model_of(kind))
        tokens, _ = drafted(kind, proposer, prompt_cache=prompt_cache, **options)
        assert tokens == expected
        quantised = any(isinstance(c, QuantizedKVCache) for c in prompt_cache)
        assert quantised == (start < 100)


@pytest.mark.parametrize("size", [16, 30, 64])
def test_max_kv_size(size):
    expected = plain(DENSE, max_kv_size=size)
    for proposer in proposers(expected):
        if size < 40:
            with pytest.warns(UserWarning, match="max_kv_size"):
                tokens, stats = drafted(DENSE, proposer, max_kv_size=size)
            assert "max_kv_size" in stats.fallback
        else:
            tokens, _ = drafted(DENSE, proposer, max_kv_size=size)
        assert tokens == expected


def test_max_kv_size_says_so_where_it_has_no_effect():
    with pytest.warns(UserWarning, match="`max_kv_size` has no effect"):
        drafted(HYBRID, make_drafter(), max_kv_size=64)


@pytest.mark.parametrize(
    "kind, options, message",
    [
        (SLIDING, dict(kv_bits=4), "`kv_bits` is 4.*RotatingKVCache"),
        (DENSE, dict(kv_bits=4, max_kv_size=64), "`kv_bits` is 4.*RotatingKVCache"),
        (DENSE, dict(kv_bits=7), "`kv_bits` is 7 but has to be"),
        (DENSE, dict(kv_bits=4, kv_group_size=48), "`kv_group_size` is 48 but has to be"),
        (DENSE, dict(kv_bits=4, kv_group_size=64), "`kv_group_size` is 64 but has to divide 32"),
        (DENSE, dict(sampler=make_sampler(1.0, top_k=VOCAB)), "`top_k` is 512 .* below 512"),
        (DENSE, dict(sampler=make_sampler(1.0), seed=-1), "`seed` is -1"),
    ],
    ids=str,
)
def test_what_mlx_lm_cannot_do_is_refused_at_once(kind, options, message):
    with pytest.raises(ValueError, match=message):
        drafted(kind, make_drafter(), **options)


def test_a_batched_prompt_is_refused():
    with pytest.raises(ValueError, match=r"`prompt` is of shape \(2, 3\).*one row"):
        next(dflash_generate_step(mx.zeros((2, 3), mx.int32), model_of(DENSE), make_drafter()))


def test_cache_arrays_hold_the_quantised_rows():
    prompt_cache = make_prompt_cache(model_of(DENSE))
    drafted(DENSE, make_drafter(), prompt_cache=prompt_cache, kv_bits=8, kv_group_size=32,
            quantized_kv_start=0)  # fmt: skip
    assert all(array.shape[2] == prompt_cache[0].offset for array in cache_arrays(prompt_cache))
