"""A drafter that is hardly ever right costs speed: one warning, and a line in the summary."""

import warnings

import mlx.core as mx
import pytest
from support.proposers import half, liar
from support.tiny import DENSE, VOCAB, make_model, plain_tokens

from mlx_dflash2 import Stats
from mlx_dflash2.decode.stats import LOW_ACCEPTANCE_ROUNDS
from mlx_dflash2.generate import dflash_generate_step

PROMPT = list(range(5, 25))


@pytest.fixture(scope="module")
def case():
    model = make_model(DENSE)
    return model, plain_tokens(model, PROMPT, 100)


def run(model, proposer, max_tokens):
    stats = Stats()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps = dflash_generate_step(
            mx.array(PROMPT), model, proposer, max_tokens=max_tokens, stats=stats, verify_width=8
        )
        tokens = [token for token, _, _ in steps]
    found = [str(w.message) for w in caught if "rarely accepted" in str(w.message)]
    return tokens, stats, found


def test_one_warning_names_the_causes_and_tokens_stay(case):
    model, plain = case
    tokens, stats, found = run(model, liar(PROMPT + plain, VOCAB), 90)
    assert tokens == plain[:90]
    (warning,) = found
    assert f"0 of {LOW_ACCEPTANCE_ROUNDS}" in warning and "20%" in warning
    causes = ["another target", "template", "config or weights", "dtype", "text", "doctor --trace"]
    places = [warning.index(cause) for cause in causes]
    assert places == sorted(places)
    assert "Low acceptance: only 0 of" in stats.summary()
    assert stats.acceptance_rates[0] == 0


def test_no_warning_for_few_rounds_or_good_drafts(case):
    model, plain = case
    _, stats, found = run(model, liar(PROMPT + plain, VOCAB), LOW_ACCEPTANCE_ROUNDS)
    assert not found and "Low acceptance" not in stats.summary()
    _, stats, found = run(model, half(PROMPT + plain, VOCAB, 1), 90)
    assert stats.rounds > LOW_ACCEPTANCE_ROUNDS and not found


def test_host_reads_are_one_a_round(case):
    model, plain = case
    _, stats, _ = run(model, half(PROMPT + plain, VOCAB, 1), 21)
    assert stats.host_reads == stats.rounds + 1
