"""What requests share: later ones read only what is new, and say the same as without a cache."""

import copy

import mlx.core as mx
import pytest
from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache
from support.saved_models import save_drafter, save_target
from support.serving import Served, chat, save_thinking_pair
from support.tiny import DENSE, HYBRID, SLIDING, drafter_config, make_drafter, make_model

from mlx_dflash2.copies import CopyProposer
from mlx_dflash2.decode.batch.decoder import BatchDecoder
from mlx_dflash2.server.store import PromptStore

KINDS = (DENSE, HYBRID, SLIDING)
SYSTEM = {"role": "system", "content": "Be kind and brief, and never say anything about the sea."}
LONG = "a long story about a hill, and about a bee that lives there in a cold and windy corner. "


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    save_target(folder / "target", request.param)
    save_drafter(folder / "drafter", drafter_config(block_size=4))
    return folder


@pytest.fixture
def server(pair):
    with Served(pair) as server:
        yield server


def message(role, content):
    return {"role": role, "content": content}


def say(server, messages, **options):
    """The answer to messages, and what of them was cached and read."""
    answer = server.ask({"messages": messages, "max_tokens": 16} | options)
    timings = answer["timings"]
    return answer["choices"][0]["message"]["content"], timings["cache_n"], timings["prompt_n"]


def fresh(pair, messages, **options):
    with Served(pair) as server:
        return say(server, messages, **options)[0]


def entries(server):
    """Tokens, target caches and context of everything that is stored."""
    lru = server.service.generator.store.lru
    found = []
    for kind, queue in lru._lru._lrus.items():
        for key, tokens in queue:
            *caches, context = lru._trie.get(key, tokens).prompt_cache
            found.append((kind, tokens, caches, context))
    return found


def test_the_second_turn_reads_what_is_new(server, pair):
    """Of a conversation of a thousand tokens, a small part of the first turn's work."""
    first = [SYSTEM, message("user", LONG * 15)]
    answer, cached, read = say(server, first)
    assert cached == 0 and read > 1000
    second = [*first, message("assistant", answer), message("user", "and then?")]
    text, cached, again = say(server, second)
    # The tiny model's answer is no text: it may be spelled in more tokens than it was said in.
    assert cached >= read - 1 and again < read / 10
    assert text == fresh(pair, second)


def test_the_same_prompt_again_reads_one_token(server):
    messages = [SYSTEM, message("user", "hello there")]
    answer, cached, read = say(server, messages)
    again = say(server, messages)
    assert again[0] == answer and cached == 0
    # Recurrent states and full rings only go back to the end of the prompt's last but one token.
    assert again[1:] == (read - 1, 1)


def test_another_question_shares_the_system_prompt(server, pair):
    one, two = ([SYSTEM, message("user", text)] for text in ("first question", "another one"))
    say(server, one)
    text, cached, _ = say(server, two)
    tokenizer = server.provider.tokenizer
    shared = tokenizer.apply_chat_template([SYSTEM], add_generation_prompt=False)
    assert cached >= len(shared) and text == fresh(pair, two)


def test_stored_caches_are_those_of_their_tokens(server):
    """As from a fresh prefill, and with the drafter's context up to the same place."""
    messages = [SYSTEM, message("user", "some words")]
    say(server, messages, stop=None)
    say(server, messages, max_tokens=3)
    found = entries(server)
    assert {kind for kind, *_ in found} >= {"assistant"}
    model = server.provider.model
    for _, tokens, caches, context in found:
        assert context.length == context.context.offset == len(tokens)
        new = make_prompt_cache(model)
        model(mx.array([tokens]), cache=new)
        caches = copy.deepcopy(caches)
        for step in ([3], [1, 2], [4]):
            ours, theirs = (model(mx.array([step]), cache=c) for c in (caches, new))
            assert mx.allclose(ours, theirs, rtol=0, atol=2e-5).item()


def test_plain_and_drafted_answers_share_the_cache(server, pair):
    """A plain answer leaves the context where it was; the next one fills it from there."""
    messages = [SYSTEM, message("user", "some words")]
    plain, *_ = say(server, messages, draft=False)
    found = entries(server)
    assert all(context.context.offset == 0 for *_, context in found)
    drafted, cached, _ = say(server, messages, num_draft_tokens=3)
    assert drafted == plain == fresh(pair, messages) and cached > 0


def test_other_options_do_not_change_what_is_cached(server, pair):
    """A cache is of tokens, however they were drawn."""
    messages = [SYSTEM, message("user", "some words")]
    say(server, messages, temperature=1.0)
    greedy, cached, _ = say(server, messages)
    assert greedy == fresh(pair, messages) and cached > 0


@pytest.mark.parametrize("width", [None, 3])
def test_a_seed_gives_the_same_answer_whatever_is_cached(width, server, pair):
    """Draws depend on drafts, and drafts on a context that cannot always be cut."""
    messages = [SYSTEM, message("user", "some words")]
    options = {"temperature": 1.5, "seed": 7, "num_draft_tokens": width}
    first, cached, read = say(server, messages, **options)
    assert cached == 0
    assert [say(server, messages, **options)[0] for _ in range(2)] == [first] * 2
    say(server, messages, max_tokens=40)
    again, *_ = say(server, messages, **options)
    assert again == first == fresh(pair, messages, **options)
    # Without drafts nothing depends on the context.
    plain = options | {"num_draft_tokens": 0}
    found, cached, _ = say(server, messages, **plain)
    assert found == fresh(pair, messages, **plain) and cached >= read - 1


@pytest.mark.parametrize("kind", [DENSE, HYBRID])
def test_a_thinking_model(kind, tmp_path):
    """Thoughts are not part of the next prompt, whose caches go back to before they began."""
    pair = save_thinking_pair(tmp_path, kind)
    with Served(pair) as server:
        tokenizer = server.provider.tokenizer
        first = [SYSTEM, message("user", "what is it?")]
        _, cached, _ = say(server, first)
        kinds = [kind for kind, *_ in entries(server)]
        second = [*first, message("assistant", "It is a bee."), message("user", "why?")]
        text, cached, new = say(server, second)
        prompt = tokenizer.apply_chat_template(first, add_generation_prompt=True)
        think = tokenizer.rfind_think_start(prompt)
        assert think == len(prompt) - 1 and cached == think
        total = cached + new
        assert total == len(tokenizer.apply_chat_template(second, add_generation_prompt=True))
    assert text == fresh(pair, second)
    if kind == HYBRID:
        assert {"system", "user", "assistant"} == set(kinds)


def test_an_answer_with_quantized_caches(pair):
    words = ("--kv-bits", 8, "--kv-group-size", 32, "--quantized-kv-start", 10)
    try:
        server = Served(pair, *words)
    except ValueError as error:
        pytest.skip(str(error))
    with server:
        messages = [SYSTEM, message("user", "hello there")]
        if server.provider.pair.model.model_type == SLIDING:
            status, error = server.refusal({"messages": messages})
            assert status == 500 and "kv_bits" in error["message"]
            return
        answer, _, read = say(server, messages)
        again = say(server, messages)
        assert again == (answer, read - 1, 1)


def test_entries_are_bounded_by_number(model_folders):
    with Served(model_folders, "--prompt-cache-size", 3) as server:
        for i in range(8):
            server.ask(chat(f"{i} is the number", max_tokens=2))
            assert len(server.service.generator.store.lru) <= 3
        again = server.ask(chat("7 is the number", max_tokens=2))
        assert again["timings"]["cache_n"] > 15


def test_entries_are_bounded_by_bytes(model_folders):
    with Served(model_folders) as server:
        server.ask(chat("one entry", max_tokens=2))
        size = server.service.generator.store.lru.nbytes
    assert size > 0
    with Served(model_folders, "--prompt-cache-bytes", int(2.5 * size)) as server:
        lru = server.service.generator.store.lru
        for i in range(6):
            server.ask(chat(f"{i} is the number", max_tokens=2))
            assert lru.nbytes <= 2.5 * size
        assert len(lru) >= 1
    with Served(model_folders, "--prompt-cache-bytes", size // 2) as server:
        server.ask(chat("one entry", max_tokens=2))
        assert len(server.service.generator.store.lru) == 0


def test_running_answers_count_among_the_bytes(model_folders):
    """Entries make room for what is being decoded."""
    with Served(model_folders) as server:
        for text in ("first", "second"):
            server.ask(chat(text, max_tokens=2))
        size = server.service.generator.store.lru.nbytes
    # Room for both, or for one and a running answer.
    with Served(model_folders, "--prompt-cache-bytes", size) as server:
        lru = server.service.generator.store.lru
        for text in ("first", "second"):
            server.ask(chat(text, max_tokens=2))
        assert len(lru) == 2
        numbers, step = [], BatchDecoder.step
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BatchDecoder, "step", lambda self: (numbers.append(len(lru)), step(self)))
            server.ask(chat("third", max_tokens=5))
        assert numbers[0] == 2 and set(numbers[1:]) == {1}


def test_copies_go_on_from_a_stored_prompt():
    """The text that was cached can be copied from, beside the drafter's own context."""
    store = PromptStore(LRUPromptCache(4), "pair")
    model, tokens = make_model(DENSE), list(range(3, 12))
    caches = make_prompt_cache(model)
    model(mx.array([tokens]), caches)
    drafter = make_drafter()
    inner = drafter.make_context()
    store.keep(tokens, caches, inner, "user", own=True)
    session, count = store.fetch([*tokens, 5])
    assert count == len(tokens)
    context = session.context_for(CopyProposer(drafter))
    assert context.index.tokens == tokens and context.position == count
    assert session.context_for(drafter) is context.inner
