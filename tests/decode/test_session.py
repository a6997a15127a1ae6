"""Turns of a conversation process only what is new, and equal cold runs."""

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache
from support.proposers import half, oracle
from support.runs import model_of, plain_of
from support.tiny import DENSE, HYBRID, SLIDING, VOCAB, make_drafter

from mlx_dflash2 import DFlashPromptCache
from mlx_dflash2.decode.rollback import num_cached
from mlx_dflash2.decode.stats import Stats
from mlx_dflash2.generate import dflash_generate_step

KINDS = (DENSE, HYBRID, SLIDING, "gemma4_text-shared")
FIRST, SECOND, THIRD = list(range(5, 30)), [100, 101, 102], [200, 201]


def turn(kind, session, prompt, drafter, max_tokens=20, stop=None):
    """One answer to a whole prompt; how many tokens of it were processed is in the stats."""
    stats = Stats()
    rest = session.reuse(prompt)
    steps = dflash_generate_step(
        rest, model_of(kind), drafter, prompt_cache=session, max_tokens=max_tokens, stats=stats
    )
    tokens = []
    for token, _, _ in steps:
        tokens.append(token)
        if len(tokens) == stop:
            steps.close()
    assert stats.prompt_tokens == rest.size
    assert stats.cached_tokens == len(prompt) - rest.size
    return tokens, stats


def assert_exact(kind, session):
    """The session's caches continue as a fresh prefill of its tokens."""
    model, fresh = model_of(kind), make_prompt_cache(model_of(kind))
    assert len(session) == len(session.tokens) == num_cached(session.caches)
    model(mx.array([session.tokens]), cache=fresh)
    copy = DFlashPromptCache(model, session.draft_model)
    copy.caches[:] = [type(c).from_state(c.state) for c in session.caches]
    step = mx.array([[7]])
    ours, theirs = model(step, cache=copy.caches), model(step, cache=fresh)
    assert mx.allclose(ours, theirs, atol=2e-5).item()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop", [None, 1, 4, 9])
def test_turns_process_only_new_tokens(kind, stop):
    drafter = make_drafter()
    session = DFlashPromptCache(model_of(kind), drafter)
    prompt, answer, processed = list(FIRST), [], []
    for message in ([], SECOND, THIRD):
        prompt = prompt + answer + message
        answer, stats = turn(kind, session, prompt, drafter, stop=stop)
        assert answer == plain_of(kind, tuple(prompt))[: stop or 20]
        assert session.tokens == prompt + answer
        assert session.context.offset == len(session)
        processed.append(stats.prompt_tokens)
    assert processed == [len(FIRST), len(SECOND), len(THIRD)]


@pytest.mark.parametrize("kind", KINDS)
def test_another_question_after_the_same_beginning(kind):
    """What cannot be trimmed goes back to the end of the prompt or answer that is shared."""
    drafter = make_drafter()
    session = DFlashPromptCache(model_of(kind), drafter)
    first, _ = turn(kind, session, FIRST, drafter)
    turn(kind, session, FIRST + first + SECOND, drafter)
    branch = FIRST + first + THIRD
    tokens, stats = turn(kind, session, branch, drafter)
    assert tokens == plain_of(kind, tuple(branch))
    assert stats.prompt_tokens == len(THIRD)
    # A template that drops the answer: back to the end of the first prompt.
    again = FIRST + THIRD
    tokens, stats = turn(kind, session, again, drafter)
    assert tokens == plain_of(kind, tuple(again))
    assert stats.prompt_tokens == len(THIRD)
    assert_exact(kind, session)


@pytest.mark.parametrize("kind", KINDS)
def test_a_wholly_different_prompt_starts_over(kind):
    drafter = make_drafter()
    session = DFlashPromptCache(model_of(kind), drafter)
    turn(kind, session, FIRST, drafter)
    other = list(range(300, 340))
    tokens, stats = turn(kind, session, other, drafter)
    assert tokens == plain_of(kind, tuple(other))
    assert stats.prompt_tokens == len(other) and session.tokens == other + tokens


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_prompt_again_processes_at_least_one_token(kind):
    drafter = make_drafter()
    session = DFlashPromptCache(model_of(kind), drafter)
    first, _ = turn(kind, session, FIRST, drafter)
    second, stats = turn(kind, session, FIRST, drafter)
    assert first == second and 1 <= stats.prompt_tokens <= len(FIRST)
    with pytest.raises(ValueError, match="`prompt` is empty"):
        session.reuse([])


@pytest.mark.parametrize("kind", KINDS)
def test_reuse_keeps_the_drafters_acceptance(kind):
    """The second turn's first draft equals that of a context fed from the start."""
    drafter, drafts = make_drafter(), []
    propose = type(drafter).propose

    class Watched(type(drafter)):
        def propose(self, *args):
            proposal = propose(self, *args)
            drafts.append(proposal.tokens.tolist())
            return proposal

    watched = Watched(drafter.args)
    watched.update(drafter.parameters())
    session = DFlashPromptCache(model_of(kind), watched)
    first, _ = turn(kind, session, FIRST, watched)
    whole = FIRST + first + SECOND
    drafts.clear()
    turn(kind, session, whole, watched)
    warm = drafts[0]
    drafts.clear()
    turn(kind, DFlashPromptCache(model_of(kind), watched), whole, watched)
    assert warm == drafts[0]


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded(kind, tmp_path):
    drafter = make_drafter()
    session = DFlashPromptCache(model_of(kind), drafter)
    first, _ = turn(kind, session, FIRST, drafter)
    session.save(tmp_path / "c.safetensors", {"model": "m"})
    loaded, metadata = DFlashPromptCache.load(tmp_path / "c.safetensors", model_of(kind), drafter)
    assert metadata == {"model": "m"}
    assert loaded.tokens == session.tokens and len(loaded) == len(session)
    assert loaded.context.offset == session.context.offset
    for ours, theirs in zip(loaded.context.layers, session.context.layers, strict=True):
        pairs = zip(ours.keys_and_values(), theirs.keys_and_values(), strict=True)
        assert all(mx.array_equal(a, b).item() for a, b in pairs)
    whole = FIRST + first + SECOND
    tokens, stats = turn(kind, loaded, whole, drafter)
    assert tokens == plain_of(kind, tuple(whole)) and stats.prompt_tokens == len(SECOND)


@pytest.mark.parametrize("kind", KINDS)
def test_files_go_both_ways_with_mlx_lm(kind, tmp_path):
    model, drafter, file = model_of(kind), make_drafter(), tmp_path / "c.safetensors"
    # Ours, read by mlx-lm: the context behind the caches does no harm.
    session = DFlashPromptCache(model, drafter)
    first, _ = turn(kind, session, FIRST, drafter)
    session.save(file)
    whole = FIRST + first + SECOND
    steps = generate_step(
        mx.array(SECOND), model, prompt_cache=load_prompt_cache(str(file)), max_tokens=20
    )
    assert [token for token, _ in steps] == plain_of(kind, tuple(whole))
    # Theirs, read by us: cold, at the right position.
    caches = make_prompt_cache(model)
    model(mx.array([FIRST]), cache=caches)
    save_prompt_cache(str(file), caches)
    loaded, _ = DFlashPromptCache.load(file, model, drafter)
    assert len(loaded) == len(FIRST) and loaded.context.offset == 0
    stats = Stats()
    steps = dflash_generate_step(
        mx.array(SECOND), model, drafter, prompt_cache=loaded, max_tokens=20, stats=stats
    )
    assert [token for token, _, _ in steps] == plain_of(kind, tuple(FIRST + SECOND))
    assert stats.cached_tokens == len(FIRST) and stats.draft_failures == 0


@pytest.mark.parametrize("kind", KINDS)
def test_plain_mlx_lm_may_go_on_with_the_caches(kind):
    drafter = make_drafter()
    session = DFlashPromptCache(model_of(kind), drafter)
    first, _ = turn(kind, session, FIRST, drafter)
    steps = generate_step(
        mx.array(SECOND), model_of(kind), prompt_cache=session.caches, max_tokens=5
    )
    between = [token for token, _ in steps]
    whole = FIRST + first + SECOND
    assert between == plain_of(kind, tuple(whole))[:5]
    tokens, _ = turn(kind, session, whole, drafter)
    assert tokens == plain_of(kind, tuple(whole))


@pytest.mark.parametrize("offset", [0, 10, 30, 999])
def test_a_context_behind_or_ahead_of_the_caches_starts_cold(offset):
    drafter = make_drafter()
    session = DFlashPromptCache(model_of(DENSE), drafter)
    first, _ = turn(DENSE, session, FIRST, drafter)
    session.context.offset = offset
    whole = FIRST + first + SECOND
    tokens, stats = turn(DENSE, session, whole, drafter)
    assert tokens == plain_of(DENSE, tuple(whole)) and stats.draft_failures == 0
    assert session.context.offset == len(session)


def test_another_drafter_starts_cold():
    one, other = make_drafter(), make_drafter(target_layer_ids=[0, 2, 3])
    session = DFlashPromptCache(model_of(DENSE), one)
    first, _ = turn(DENSE, session, FIRST, one)
    whole = FIRST + first + SECOND
    tokens, stats = turn(DENSE, session, whole, other)
    assert tokens == plain_of(DENSE, tuple(whole)) and stats.prompt_tokens == len(SECOND)


def test_any_proposer_can_have_a_session():
    plain = plain_of(DENSE, tuple(FIRST))
    proposer = half(FIRST + plain, VOCAB, 3)
    session = DFlashPromptCache(model_of(DENSE), proposer)
    tokens, _ = turn(DENSE, session, FIRST, proposer)
    whole = FIRST + tokens + SECOND
    better = oracle(whole + plain_of(DENSE, tuple(whole)))
    assert turn(DENSE, session, whole, better)[0] == plain_of(DENSE, tuple(whole))


def test_an_emptied_cache_is_made_anew():
    drafter = make_drafter()
    session = DFlashPromptCache(model_of(HYBRID), drafter)
    turn(HYBRID, session, FIRST, drafter)
    session.caches.clear()
    tokens, _ = turn(HYBRID, session, FIRST, drafter)
    assert tokens == plain_of(HYBRID, tuple(FIRST))


def test_files_that_do_not_fit_are_refused(tmp_path):
    drafter = make_drafter()
    with pytest.raises(FileNotFoundError, match=r"no prompt cache .*none\.safetensors"):
        DFlashPromptCache.load(tmp_path / "none.safetensors", model_of(DENSE), drafter)
    save_prompt_cache(str(tmp_path / "c.safetensors"), make_prompt_cache(model_of(DENSE))[:2])
    with pytest.raises(ValueError, match="has 2 caches but the target has 4"):
        DFlashPromptCache.load(tmp_path / "c.safetensors", model_of(DENSE), drafter)


def test_checkpoints_are_bounded():
    drafter = make_drafter()
    session = DFlashPromptCache(model_of(HYBRID), drafter)
    prompt = list(FIRST)
    for _ in range(8):
        answer, _ = turn(HYBRID, session, prompt, drafter, max_tokens=2)
        prompt = prompt + answer + [9]
    assert len(session.checkpoints) <= 5 and session.checkpoints[0].length == 0
