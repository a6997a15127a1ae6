"""The next draft begins when a round's last token is handed out, before the caller's own work."""

import mlx.core as mx
import pytest
from support.proposers import half, oracle
from support.runs import model_of, prompt_and_plain, steps_of
from support.tiny import DENSE, HYBRID, SLIDING, VOCAB, make_drafter, plain_tokens

from mlx_dflash2 import DFlashPromptCache, Stats, make_sampler
from mlx_dflash2.copies import CopyProposer
from mlx_dflash2.generate import dflash_generate_step

KINDS = (DENSE, HYBRID, SLIDING)


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_begins_with_the_last_token_of_its_round(kind):
    prompt, plain = prompt_and_plain(kind, 16)
    proposer = half(prompt + plain, VOCAB, 2)
    calls = [proposer.calls for _ in steps_of(kind, prompt, proposer, max_tokens=11)]
    # The prompt's pass gives one token, each round three; the eleventh has no room for a draft.
    assert calls == [1, 1, 1, 2, 2, 2, 3, 3, 3, 3, 3]


@pytest.mark.parametrize("stop", range(1, 9))
def test_copies_are_looked_up_ahead_too(stop):
    """The drafter begins ahead only where there is nothing to copy; the index stays exact."""
    prompt, plain = prompt_and_plain(DENSE, 16)
    drafter = half(prompt + plain, VOCAB, 2)
    proposer, model = CopyProposer(drafter), model_of(DENSE)
    session = DFlashPromptCache(model, proposer)
    steps = steps_of(DENSE, prompt, proposer, session, max_tokens=30, verify_width=8)
    tokens, calls = [], []
    for _ in range(stop):
        tokens.append(next(steps)[0])
        calls.append(drafter.calls)
    steps.close()
    assert tokens == plain[:stop] and calls == [1, 1, 1, 2, 2, 2, 3, 3][:stop]
    known = session.context.index.tokens
    assert session.tokens == prompt + tokens == known[: len(session.tokens)]
    whole = [*prompt, *tokens, *prompt]
    rest = session.reuse(whole)
    again = steps_of(DENSE, rest.tolist(), proposer, session, max_tokens=8, verify_width=8)
    assert [t for t, _, _ in again] == plain_tokens(model, whole, 8)


def test_each_round_drafts_once():
    prompt, plain = prompt_and_plain(DENSE, 16)
    proposer, stats = half(prompt + plain, VOCAB, 2), Stats()
    list(steps_of(DENSE, prompt, proposer, max_tokens=30, stats=stats))
    assert proposer.calls == stats.first_drafts == stats.rounds > 8


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop", range(1, 9))
def test_a_conversation_goes_on_exactly_where_the_caller_stopped(kind, stop):
    prompt, plain = prompt_and_plain(kind, 16)
    proposer, model = half(prompt + plain, VOCAB, 2), model_of(kind)
    session = DFlashPromptCache(model, proposer)
    steps = steps_of(kind, prompt, proposer, session, max_tokens=30)
    tokens = [next(steps)[0] for _ in range(stop)]
    steps.close()
    # The stub refuses rows that it has been shown before, and rows that it misses.
    assert session.tokens == prompt + tokens
    assert session.context.tokens == dict(enumerate(session.tokens))
    rest = session.reuse([*prompt, *tokens, 5])
    again = [t for t, _, _ in steps_of(kind, rest.tolist(), proposer, session, max_tokens=8)]
    assert again == plain_tokens(model, [*prompt, *tokens, 5], 8)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_failing_draft_costs_no_token(error):
    prompt, plain = prompt_and_plain(DENSE, 16)
    proposer = oracle(prompt + plain, block_size=4)
    rule = proposer.rule
    session, tokens = DFlashPromptCache(model_of(DENSE), proposer), []

    def fails_at_the_third(position, length):
        if proposer.calls == 3:
            raise error("no draft")
        return rule(position, length)

    proposer.rule = fails_at_the_third
    steps = steps_of(DENSE, prompt, proposer, session, max_tokens=20)
    if error is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            tokens.extend(token for token, _, _ in steps)
        # The ninth token was about to be handed out.
        assert len(tokens) == 8
    else:
        with pytest.warns(UserWarning, match="no draft"):
            tokens.extend(token for token, _, _ in steps)
        assert len(tokens) == 20
    assert tokens == plain[: len(tokens)] and session.tokens == prompt + tokens


def test_a_seed_draws_the_same_however_wide_the_rounds_turn_out():
    """A draft that is not verified takes no key from the draws of its round."""
    prompt, drafter = list(range(5, 25)), make_drafter()

    def draws(max_tokens):
        steps = dflash_generate_step(
            mx.array(prompt), model_of(DENSE), drafter, max_tokens=max_tokens,
            sampler=make_sampler(temp=1.0), seed=4,
        )  # fmt: skip
        return [token for token, _, _ in steps]

    long = draws(24)
    assert draws(24) == long and len(set(long)) > 4


def test_a_parked_round_begins_no_draft(monkeypatch):
    monkeypatch.setattr("mlx_dflash2.decode.loop.start_width", lambda: 1)
    prompt, plain = prompt_and_plain(DENSE, 16)
    proposer = oracle(prompt + plain)
    steps = steps_of(DENSE, prompt, proposer, max_tokens=10, verify_width=None)
    assert [token for token, _, _ in steps] == plain[:10] and proposer.calls == 0
