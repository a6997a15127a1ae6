"""A drafter that drafts frequent tokens alone: every draft is one of them, and no token changes."""

import mlx.core as mx
import pytest
from support.runs import model_of, plain_of
from support.tiny import DENSE, HYBRID, VOCAB, make_drafter, make_tokenizer

from mlx_dflash2 import Stats, batch_generate, make_sampler
from mlx_dflash2.decode.sampling import PureProcessor
from mlx_dflash2.drafter.model import Drafter
from mlx_dflash2.drafter.variants import without_selector
from mlx_dflash2.drafter.vocabulary import FrequentTokens
from mlx_dflash2.generate import dflash_generate_step
from mlx_dflash2.targets import bind

PROMPT = list(range(5, 25))
IDS = [*range(0, VOCAB, 5), 11, 12]


def narrow(drafter, ids=IDS):
    drafter.frequent_tokens = FrequentTokens(ids)
    return drafter


@pytest.fixture
def drafted(monkeypatch):
    """All drafts that are made."""
    seen, choose = [], Drafter.choose

    def noted(self, *args, **kwargs):
        proposals = choose(self, *args, **kwargs)
        seen.extend(token for proposal in proposals for token in proposal.tokens.tolist())
        return proposals

    monkeypatch.setattr(Drafter, "choose", noted)
    return seen


def run(kind, drafter, bits=None, **options):
    stats = Stats()
    steps = dflash_generate_step(
        mx.array(PROMPT), model_of(kind, bits), drafter, max_tokens=30, stats=stats,
        verify_width=drafter.block_size, **options,
    )  # fmt: skip
    return [token for token, _, _ in steps], stats


@pytest.mark.parametrize("change", [lambda drafter: drafter, without_selector])
@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("kind", [DENSE, HYBRID, "qwen3-untied"])
def test_tokens_are_plain_mlx_lms(kind, bits, change, drafted):
    tokens, stats = run(kind, narrow(change(make_drafter())), bits)
    assert tokens == plain_of(kind, tuple(PROMPT), 30, bits)
    assert stats.drafted > 0 and drafted and set(drafted) <= set(IDS)


@pytest.mark.parametrize("bits", [None, 4])
def test_logits_are_those_columns_of_the_whole_head(bits):
    target, drafter = bind(model_of(DENSE, bits)), make_drafter()
    hidden = mx.random.normal((1, 3, 64))
    frequent = FrequentTokens(IDS)
    head = frequent.head_of(target, VOCAB)
    assert head.draft_ids.tolist() == sorted(set(IDS))
    assert mx.allclose(head.head(hidden), target.head(hidden)[..., head.draft_ids], atol=1e-5)
    # The rows are picked once for a target, and anew for another one.
    assert frequent.head_of(target, VOCAB).part is head.part
    assert frequent.head_of(bind(model_of(DENSE, bits, seed=1)), VOCAB).part is not head.part
    assert drafter.frequent_tokens is None


def test_all_ids_draft_as_none(drafted):
    drafter = make_drafter()
    run(DENSE, drafter)
    whole = list(drafted)
    drafted.clear()
    run(DENSE, narrow(drafter, range(VOCAB)))
    assert drafted == whole


def test_a_seed_draws_from_frequent_tokens(drafted):
    tokens, stats = run(DENSE, narrow(make_drafter()), sampler=make_sampler(1.0), seed=3)
    assert len(tokens) == 30 and stats.fallback is None
    assert len(set(drafted)) > 8 and set(drafted) <= set(IDS)


def test_processors_name_ids_of_the_whole_vocabulary(drafted):
    def fives(tokens, logits):
        return logits + 1000 * (mx.arange(VOCAB) == (tokens[-1].astype(mx.int32) + 5) % 500)

    prompt_end = PROMPT[-1]
    ids = [(prompt_end + 5 * k) % 500 for k in range(100)]
    options = dict(logits_processors=[PureProcessor(fives)])
    tokens, stats = run(DENSE, narrow(make_drafter(), ids), **options)
    assert tokens == [prompt_end + 5 * k for k in range(1, 31)]
    assert stats.accepted_at[0] == stats.drafted_at[0] > 4


def test_a_batch(drafted):
    prompts = [PROMPT, [7, 100], [3, 4, 200]]
    found = batch_generate(
        model_of(DENSE), make_tokenizer(), prompts, max_tokens=20, return_token_ids=True,
        draft_model=narrow(make_drafter()), verify_width=8,
    )  # fmt: skip
    assert found.token_ids == [plain_of(DENSE, tuple(p), 20) for p in prompts]
    assert drafted and set(drafted) <= set(IDS)


def test_ids_that_cannot_be_drafted_are_refused():
    with pytest.raises(ValueError, match="`draft_vocab` has to name at least one id"):
        FrequentTokens([])
    wrong = narrow(make_drafter(), [3, VOCAB])
    with pytest.raises(ValueError, match=f"names token {VOCAB} but has to name tokens from 0"):
        run(DENSE, wrong)
    assert FrequentTokens([1, 2]).coverage([1, 1, 2, 9]) == 0.75
