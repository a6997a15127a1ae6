"""Over the turns of a conversation the index holds what the caches cover."""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache, save_prompt_cache
from support.runs import model_of
from support.tiny import DENSE, HYBRID, SLIDING, make_drafter, plain_tokens

from mlx_dflash2 import DFlashPromptCache, copies
from mlx_dflash2.copies import CopyProposer
from mlx_dflash2.decode.stats import Stats
from mlx_dflash2.generate import dflash_generate_step

KINDS = (DENSE, HYBRID, SLIDING)
FIRST, SECOND, THIRD = list(range(5, 30)), [100, 101, 102], [200, 201]


def turn(kind, session, prompt, proposer, max_tokens=20, stop=None):
    """One answer to a whole prompt, and the caches and the index are right before and after."""
    stats = Stats()
    steps = dflash_generate_step(
        session.reuse(prompt), model_of(kind), proposer, prompt_cache=session,
        max_tokens=max_tokens, stats=stats, prefill_step_size=9,
    )  # fmt: skip
    tokens = []
    for token, _, _ in steps:
        if not tokens:
            # The rest of the round may be known already.
            assert session.context.index.tokens[: len(prompt) - 1] == prompt[:-1]
        tokens.append(token)
        if len(tokens) == stop:
            steps.close()
    assert tokens == plain_tokens(model_of(kind), prompt, max_tokens)[: len(tokens)]
    follows(session)
    return tokens, stats


def follows(session):
    """The index is that of the session's tokens."""
    context = session.context
    assert context.index.tokens == session.tokens
    assert context.position == len(session) == len(session.tokens) and context.start == 0


@pytest.mark.parametrize("stop", [None, 1, 4, 9])
@pytest.mark.parametrize("drafter", [False, True], ids=["only", "with"])
@pytest.mark.parametrize("kind", KINDS)
def test_turns(kind, drafter, stop):
    proposer = CopyProposer(make_drafter() if drafter else None)
    session = DFlashPromptCache(model_of(kind), proposer)
    prompt, answer = list(FIRST), []
    for message in ([], SECOND, THIRD):
        prompt = prompt + answer + message
        answer, stats = turn(kind, session, prompt, proposer, stop=stop)
        assert stats.prompt_tokens == len(message or FIRST)
        if drafter:
            assert session.context.offset == len(session)


@pytest.mark.parametrize("kind", KINDS)
def test_going_back_to_another_question(kind):
    """What cannot be trimmed goes further back than the prompt; the index goes along."""
    proposer = CopyProposer(make_drafter())
    session = DFlashPromptCache(model_of(kind), proposer)
    first, _ = turn(kind, session, FIRST, proposer)
    turn(kind, session, FIRST + first + SECOND, proposer)
    turn(kind, session, FIRST + first + THIRD, proposer)
    turn(kind, session, FIRST + THIRD, proposer)
    turn(kind, session, list(range(300, 340)), proposer)
    session.reuse(list(range(300, 310)))
    assert session.context.index.tokens == session.tokens == list(range(300, 300 + len(session)))


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded(kind, tmp_path):
    """Copies are not part of the file: the drafter goes on with or without them."""
    drafter = make_drafter()
    proposer, file = CopyProposer(drafter), tmp_path / "c.safetensors"
    session = DFlashPromptCache(model_of(kind), proposer)
    first, _ = turn(kind, session, FIRST, proposer)
    session.save(file)
    for other in (proposer, drafter, CopyProposer(drafter)):
        loaded, _ = DFlashPromptCache.load(file, model_of(kind), other)
        assert loaded.context.offset == session.context.offset == len(session)
        assert rows_of(loaded) and all(map(mx.array_equal, rows_of(loaded), rows_of(session)))
    for other in (proposer, CopyProposer()):
        loaded, _ = DFlashPromptCache.load(file, model_of(kind), other)
        _, stats = turn(kind, loaded, FIRST + first + SECOND, other)
        assert stats.prompt_tokens == len(SECOND)


def test_copies_alone_are_saved_and_loaded(tmp_path):
    file, session = tmp_path / "c.safetensors", DFlashPromptCache(model_of(DENSE), CopyProposer())
    first, _ = turn(DENSE, session, FIRST, session.draft_model)
    session.save(file)
    loaded, _ = DFlashPromptCache.load(file, model_of(DENSE), CopyProposer())
    _, stats = turn(DENSE, loaded, FIRST + first + SECOND, CopyProposer())
    assert stats.prompt_tokens == len(SECOND)


def rows_of(session):
    """The keys and values of the drafter's context."""
    return [x for layer in session.context.layers for x in layer.keys_and_values()]


def test_a_file_of_mlx_lm_begins_a_new_index(tmp_path):
    """Its tokens are not known: copies are from what comes after."""
    file, caches = tmp_path / "c.safetensors", make_prompt_cache(model_of(DENSE))
    model_of(DENSE)(mx.array([FIRST]), cache=caches)
    save_prompt_cache(str(file), caches)
    proposer = CopyProposer()
    loaded, _ = DFlashPromptCache.load(file, model_of(DENSE), proposer)
    steps = dflash_generate_step(
        mx.array(SECOND), model_of(DENSE), proposer, prompt_cache=loaded, max_tokens=20
    )
    tokens = [token for token, _, _ in steps]
    assert tokens == plain_tokens(model_of(DENSE), FIRST + SECOND, 20)
    assert loaded.context.start == len(FIRST)
    assert loaded.context.index.tokens == SECOND + tokens


@pytest.mark.parametrize("kind", KINDS)
def test_another_proposer_reads_what_was_said(kind):
    """A new object for every turn, as the library allows: the drafter is cold, copies are not."""
    session = DFlashPromptCache(model_of(kind), make_drafter())
    prompt = list(FIRST)
    steps = dflash_generate_step(
        session.reuse(prompt), model_of(kind), session.draft_model, prompt_cache=session,
        max_tokens=9,
    )  # fmt: skip
    prompt += [token for token, _, _ in steps]
    for message in (SECOND, THIRD):
        prompt += message
        answer, _ = turn(kind, session, prompt, CopyProposer(make_drafter()), max_tokens=9)
        prompt += answer


@pytest.mark.parametrize("call", [1, 3, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_a_turn_after_an_interruption(kind, call, monkeypatch):
    """The index was left in the middle of a token; the next turn makes it anew."""
    proposer = CopyProposer()
    session = DFlashPromptCache(model_of(kind), proposer)
    step, calls = copies.CopyIndex._step, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == call:
            raise KeyboardInterrupt
        return step(*args)

    monkeypatch.setattr(copies.CopyIndex, "_step", interrupted)
    tokens, prompt = [], FIRST + FIRST[:5]
    steps = dflash_generate_step(
        session.reuse(prompt), model_of(kind), proposer, prompt_cache=session, max_tokens=40
    )
    with pytest.raises(KeyboardInterrupt):
        for token, _, _ in steps:
            tokens.append(token)
    monkeypatch.setattr(copies.CopyIndex, "_step", step)
    # The last token of the prompt and the answer follow it; a prompt is read as one chunk.
    assert session.tokens == (prompt + tokens if tokens else prompt[:-1])
    turn(kind, session, prompt + tokens + SECOND, proposer)


def test_a_prompt_cache_without_tokens_begins_a_new_index():
    """The plain list of mlx-lm's caches: what they cover is not known."""
    caches, proposer = make_prompt_cache(model_of(DENSE)), CopyProposer()
    text = list(FIRST)
    for message in (FIRST, SECOND):
        steps = dflash_generate_step(
            mx.array(message), model_of(DENSE), proposer, prompt_cache=caches, max_tokens=12
        )
        text += message if message is SECOND else []
        plain = plain_tokens(model_of(DENSE), text, 12)
        tokens = [token for token, _, _ in steps]
        assert tokens == plain
        text += tokens
