"""Our drafter is told what pure processors make of its logits; no token changes."""

import mlx.core as mx
import pytest
from support.proposers import oracle
from support.runs import model_of
from support.tiny import DENSE, HYBRID, VOCAB, make_drafter, make_tokenizer

from mlx_dflash2 import Stats, batch_generate, make_logits_processors, make_sampler
from mlx_dflash2.decode.sampling import PureProcessor
from mlx_dflash2.drafter.variants import without_selector
from mlx_dflash2.generate import dflash_generate_step

PROMPT = list(range(5, 25))


def counting_up(tokens, logits):
    """Each token is followed by the next id, whatever the models say."""
    wanted = (tokens[-1].astype(mx.uint32) + 1) % VOCAB
    return logits + 1000 * (mx.arange(logits.shape[-1]) == wanted)


def run(kind, drafter, processors, **options):
    stats = Stats()
    steps = dflash_generate_step(
        mx.array(PROMPT), model_of(kind), drafter, max_tokens=30, stats=stats,
        logits_processors=processors, verify_width=drafter.block_size, **options,
    )  # fmt: skip
    return [token for token, _, _ in steps], stats


def assert_first_drafts_stay(stats):
    """What comes before them is known when they are made, down to the anchor."""
    assert stats.accepted_at[0] == stats.drafted_at[0] > 4


@pytest.mark.parametrize("change", [lambda drafter: drafter, without_selector])
@pytest.mark.parametrize("sampler", [None, make_sampler(0.8)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", [DENSE, HYBRID])
def test_processors_see_all_tokens_up_to_the_anchor(kind, sampler, change):
    drafter = change(make_drafter())
    tokens, stats = run(kind, drafter, [PureProcessor(counting_up)], sampler=sampler)
    assert tokens == list(range(25, 55))
    assert_first_drafts_stay(stats)


def test_each_sequence_of_a_batch_has_its_own_processors():
    drafter, stats = make_drafter(), Stats()
    prompts = [PROMPT, [7, 100], [3, 4, 200]]
    found = batch_generate(
        model_of(DENSE), make_tokenizer(), prompts, max_tokens=30, draft_model=drafter,
        return_token_ids=True, stats=stats, verify_width=drafter.block_size,
        logits_processors=[PureProcessor(counting_up)],
    )  # fmt: skip
    assert found.token_ids == [list(range(p[-1] + 1, p[-1] + 31)) for p in prompts]
    assert_first_drafts_stay(stats)


def test_a_processor_that_counts_is_not_called_for_drafts():
    calls = []

    def counts(tokens, logits):
        calls.append(tokens.size)
        return counting_up(tokens, logits)

    tokens, stats = run(DENSE, make_drafter(), [counts])
    assert tokens == list(range(25, 55)) and stats.drafted > 0
    assert calls == list(range(len(PROMPT), len(PROMPT) + 30))


@pytest.mark.parametrize(
    "settings",
    [
        dict(repetition_penalty=1.3),
        dict(presence_penalty=0.7, frequency_penalty=0.4, frequency_context_size=7),
        dict(logit_bias={3: 4.0, 9: -float("inf"), VOCAB - 1: 2.0}),
        # Nothing but three tokens is left for 16 candidates.
        dict(logit_bias={token: -float("inf") for token in range(3, VOCAB)}),
    ],
    ids=["repetition", "others", "bias", "few tokens"],
)
def test_tokens_are_those_of_any_other_drafts(settings):
    processors = make_logits_processors(**settings)
    plain, _ = run(DENSE, oracle(PROMPT), processors)
    tokens, stats = run(DENSE, make_drafter(), processors)
    assert tokens == plain and stats.fallback is None and stats.drafted > 0


def test_a_foreign_drafter_is_asked_as_before():
    """It has no argument for it."""
    proposer = oracle(PROMPT + list(range(25, 60)))
    tokens, stats = run(DENSE, proposer, [PureProcessor(counting_up)])
    assert tokens == list(range(25, 55)) and stats.accepted == stats.drafted > 0


def test_numbers_that_overflow_are_still_found():
    drafter = make_drafter()
    drafter.norm.weight = drafter.norm.weight * 1e38
    with pytest.warns(UserWarning, match="non-finite"):
        tokens, stats = run(DENSE, drafter, [PureProcessor(counting_up)])
    assert tokens == list(range(25, 55)) and stats.draft_failures == 1
