"""The chat command: mlx_lm.chat's turns, the caches between them, and Ctrl-C."""

import importlib
import io
import re
import signal
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper
from support.commands import main_of
from support.proposers import oracle
from support.saved_models import save_drafter, save_target
from support.tiny import DENSE, HYBRID, SLIDING

from mlx_dflash2 import load_drafter
from mlx_dflash2.chat import Conversation
from mlx_dflash2.chat.settings import HELP
from mlx_dflash2.cli import build
from mlx_dflash2.decode import generate as generating
from mlx_dflash2.decode.options import GenerationOptions
from mlx_dflash2.pairs.find import PairSources
from mlx_dflash2.pairs.load import Pair

command = importlib.import_module("mlx_dflash2.chat.command")
conversation_module = importlib.import_module("mlx_dflash2.chat.conversation")
mlx_lm_chat = importlib.import_module("mlx_lm.chat")
KINDS = (DENSE, HYBRID, SLIDING)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    path = tmp_path_factory.mktemp("models")
    for kind in KINDS:
        save_target(path / kind, kind)
    save_target(path / "raw", chat_template=None)
    save_drafter(path / "drafter")
    return path


@pytest.fixture(scope="module")
def pairs(folders):
    drafter = load_drafter(folders / "drafter")
    names = (*KINDS, "raw")
    return {name: Pair(name, *mlx_lm.load(str(folders / name)), drafter) for name in names}


class Script(io.StringIO):
    """Standard input: lines, of which one can be Ctrl-C."""

    def readline(self, *args):
        line = super().readline(*args)
        if line == "^C\n":
            raise KeyboardInterrupt
        return line


@pytest.fixture
def chat(monkeypatch, capsys, pairs):
    """Runs a chat command on lines of input; its status, stdout, stderr, and each turn's tokens."""

    def chat(text, *args, kind=DENSE, module=command):
        turns, pair = [], pairs[kind]
        sources = PairSources(None, SimpleNamespace(name="drafter"))
        place, name, original = module, "stream_generate", mlx_lm.stream_generate
        if module is command:
            place, name, original = conversation_module, "stream_text", generating.stream_text

        def record(*args, **kwargs):
            turns.append([])
            for response in original(*args, **kwargs):
                turns[-1].append(response.token)
                yield response

        monkeypatch.setattr(place, name, record)
        monkeypatch.setattr(command, "find_pair", lambda *_, **__: sources)
        monkeypatch.setattr(build, "load_pair", lambda *_, **__: pair)
        monkeypatch.setattr(build, "pending_downloads", lambda _: [])
        monkeypatch.setattr(mlx_lm_chat, "load", lambda *_, **__: (pair.model, pair.tokenizer))
        monkeypatch.setattr(sys, "argv", ["chat", *args])
        monkeypatch.setattr(sys, "stdin", Script(text))
        status = 0
        try:
            (main_of("chat") if module is command else module.main)()
        except SystemExit as error:
            status = error.code
        return status or 0, *capsys.readouterr(), turns

    return chat


SCRIPTS = {
    "two turns": ("Hello there\nAnd then?\nWhy?\nq\n", []),
    "system prompt": ("Hello\nWhy?\nq\n", ["--system-prompt", "Be kind."]),
    "reset": ("Hello\nr\nHello\nh\nWhy?\nq\n", []),
    "an empty message": ("\nHello\nq\n", []),
    "ring cache": ("Hello there you\nAnd then?\nq\n", ["--max-kv-size", "64"]),
    "chunks": ("Hello there you\nAnd then?\nq\n", ["--prefill-step-size", "8"]),
}


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_mlx_lm_chat(chat, kind, name):
    text, args = SCRIPTS[name]
    status, _, _, theirs = chat(text, *args, "-m", "14", kind=kind, module=mlx_lm_chat)
    assert status == 0 and len(theirs) >= 2
    status, out, err, ours = chat(text, *args, "-m", "14", kind=kind)
    assert status == 0 and ours == theirs, err
    assert len(out.split("\n")) >= len(theirs)


def test_only_the_new_message_is_processed(chat, pairs):
    text = "Hello there\nWhy?\nr\nWhy?\n"
    _, _, err, turns = chat(text, "-m", "9")
    first, second = (
        len(pairs[DENSE].tokenizer.apply_chat_template(
            [{"role": "user", "content": message}], add_generation_prompt=True
        ))
        for message in ("Hello there", "Why?")
    )  # fmt: skip
    lines = [line for line in err.splitlines() if line.startswith("[")]
    assert [len(turn) for turn in turns] == [9, 9, 9]
    assert f"prompt {first} + 0 cached" in lines[0]
    assert f"prompt {second} + {first + 9} cached" in lines[1]
    assert f"prompt {second} + 0 cached" in lines[2]


def test_stdout_has_the_answers_alone_and_stderr_a_line_on_each(chat, pairs):
    _, out, err, turns = chat("Hello\nh\nWhy?\nq\n", "-m", "9")
    tokenizer, expected = pairs[DENSE].tokenizer, ""
    for turn in turns:
        detokenizer = tokenizer.detokenizer
        for token in turn:
            detokenizer.add_token(token)
        detokenizer.finalize()
        expected += detokenizer.text + "\n"
    assert out == expected
    assert err.count(HELP) == 2
    lines = [line for line in err.splitlines() if line.startswith("[9 tokens, ")]
    assert len(lines) == 2
    assert all("tokens/s" in line and "tokens a round" in line for line in lines)
    assert "drafting stopped" not in err


COMMANDS = {
    "/temp 0.5": "temperature 0.5",
    "/max-tokens 3": "at most 3 tokens",
    "/system Be kind.": "system prompt: Be kind.",
    "/system": "no system prompt",
    "/drafts off": "drafts off",
    "/drafts maybe": "/drafts is unchanged: it has to be on or off",
    "/temp hot": "/temp is unchanged: could not convert string to float: 'hot'",
    "/temp -1": "/temp is unchanged: `temp` is -1.0 but has to be from 0.0",
    "/max-tokens 0": "/max-tokens is unchanged: `max_tokens` is 0 but has to be non-zero",
    "/nothing": "There is no command /nothing.",
}


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_say_what_they_did(chat, line):
    status, out, err, turns = chat(f"{line}\n")
    assert status == 0 and not out and not turns and COMMANDS[line] in err


def test_commands_change_the_next_answers(chat, pairs):
    text = "Hello\n/max-tokens 3\n/system Be kind.\nHello\n/max-tokens 8\n/system\nHello\n"
    status, _, err, turns = chat(text, "-m", "9")
    assert status == 0 and [len(turn) for turn in turns] == [9, 3, 8]
    prompts = [int(n) for n in re.findall(r"prompt (\d+) \+", err)]
    assert prompts[1] > prompts[0] == prompts[2]


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_switched_off_and_on_in_one_conversation(monkeypatch, chat, pairs, kind):
    """The tokens stay, and the drafter's context goes on without drafts."""
    text = "Hello\nWhy?\nAnd then?\n"
    *_, expected = chat(text, "-m", "9", kind=kind)
    turns_seen = []
    original = Conversation.answer

    def record(self, *args, **kwargs):
        yield from original(self, *args, **kwargs)
        missing = len(self.cache) - self.cache.context.offset
        turns_seen.append((self.stats.drafted > 0, missing))

    monkeypatch.setattr(Conversation, "answer", record)
    switched = text.replace("Why?", "/drafts off\nWhy?").replace("And", "/drafts on\nAnd")
    *_, turns = chat(switched, "-m", "9", "--verify-width", "4", kind=kind)
    assert turns == expected
    drafted, missing = zip(*turns_seen, strict=True)
    assert drafted == (True, False, True) and len(set(missing)) == 1


@pytest.mark.parametrize("text", ["", "Hello\n", "Hello\n^C\n", "^C\n"])
def test_the_end_of_input_and_ctrl_c_at_the_prompt_end_the_chat(chat, text):
    status, out, err, turns = chat(text, "-m", "3")
    assert status == 0 and len(turns) == text.count("Hello") == out.count("\n")
    assert "Traceback" not in err


def test_a_drafter_that_fails_is_named_and_the_answer_is_the_same(monkeypatch, chat, pairs):
    *_, expected = chat("Hello\nWhy?\n", "-m", "9")

    def fail(*_, **__):
        raise RuntimeError("no drafts today")

    monkeypatch.setattr(type(pairs[DENSE].drafter), "propose", fail)
    status, _, err, turns = chat("Hello\nWhy?\n", "-m", "9")
    assert status == 0 and turns == expected
    assert err.count("drafting stopped: the drafter raised RuntimeError: no drafts today]") == 2


def test_a_seed_that_is_none_is_refused(chat):
    status, *_ = chat("hello\n", "--seed", "-1")
    assert status == "error: --seed is -1 but has to be from 0 to 2**64 - 1."


def test_draws_differ_from_turn_to_turn_and_repeat_with_the_seed(chat):
    text, args = "Hello\nr\nHello\n", ("-m", "12", "--temp", "1.5", "--seed", "0")
    *_, once = chat(text, *args)
    *_, again = chat(text, *args)
    *_, other = chat(text, *args, "--seed", "5")
    assert once == again != other
    assert once[0] != once[1]


def test_what_does_not_fit_is_refused(chat):
    status, _, err, _ = chat("Hello\n", kind="raw")
    assert status == "error: raw has no chat template, so there is no chat with it."
    status, _, err, _ = chat("Hello\n", "--pipeline")
    assert status == 2 and "--pipeline is not supported: distributed decoding" in err
    status, _, _, turns = chat("Hello\nforbidden\n", "-m", "5")
    assert status == "error: The chat template does not take this prompt: Not this."
    assert len(turns) == 1
    assert chat("Hell\udcff\n")[0] == "error: The prompt is not valid UTF-8."
    status, _, err, _ = chat("Hello\n", "--kv-bits", "7")
    assert status.startswith("error: --kv-bits is 7 but has to be")


@pytest.mark.parametrize("start", [0, 30, 70])
@pytest.mark.parametrize("kind", [DENSE, HYBRID])
def test_quantized_caches_go_on_as_in_mlx_lm(pairs, kind, start):
    """Also where the conversion falls due in one of the turns."""
    options = dict(kv_bits=8, kv_group_size=32, quantized_kv_start=start)
    conversation = Conversation(pairs[kind], GenerationOptions(max_tokens=12, **options))
    caches = make_prompt_cache(pairs[kind].model)
    for message in ("Hello", "Why?", "And then?"):
        prompt = mx.array(prompt_of(pairs[kind], message))
        steps = generate_step(
            prompt, pairs[kind].model, max_tokens=12, prompt_cache=caches, **options
        )
        expected = [token for token, _ in steps]
        assert [response.token for response in conversation.answer(message)] == expected
    assert any(isinstance(cache, QuantizedKVCache) for cache in conversation.cache.caches)


@pytest.mark.parametrize("kind, times", [(HYBRID, 1), (DENSE, 0)])
def test_max_kv_size_says_once_that_it_has_no_effect(chat, kind, times):
    """Also over several turns, and where a new conversation begins."""
    status, _, err, turns = chat("Hello\nWhy?\nr\nHello\n", "--max-kv-size", "64", kind=kind)
    assert status == 0 and len(turns) == 3
    assert err.count("has no effect") == err.count("warning: `max_kv_size`") == times, err


def test_extra_eos_tokens_and_stop_strings_end_an_answer(chat, pairs):
    *_, turns = chat("Hello\n", "-m", "14")
    tokens = pairs[DENSE].tokenizer.convert_ids_to_tokens(turns[0])
    cut = next(i for i, token in enumerate(tokens) if i > 2 and len(token) == 2)
    *_, stopped = chat("Hello\n", "-m", "14", "--stop", tokens[cut])
    assert stopped == [turns[0][: tokens.index(tokens[cut]) + 1]]
    wrapper, other = pairs[DENSE].tokenizer, pairs[DENSE]
    other.tokenizer = TokenizerWrapper(wrapper._tokenizer, eos_token_ids=[511])
    try:
        *_, ended = chat("Hello\n", "-m", "14", "--extra-eos-token", tokens[cut])
    finally:
        other.tokenizer = wrapper
    assert ended == stopped


# Ctrl-C in mid-answer.


def cold(pair, tokens, max_tokens):
    """Plain mlx-lm from nothing."""
    steps = generate_step(mx.array(tokens), pair.model, max_tokens=max_tokens)
    return [token for token, _ in steps]


def prompt_of(pair, message):
    messages = [{"role": "user", "content": message}]
    return pair.tokenizer.apply_chat_template(messages, add_generation_prompt=True)


@pytest.mark.parametrize("shown", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_a_closed_answer_leaves_exactly_what_was_yielded(pairs, kind, shown):
    pair = pairs[kind]
    first = prompt_of(pair, "Hello")
    # Right drafts: the answer is closed at every place of a block.
    plain = cold(pair, first, 20)
    pair = Pair(pair.name, pair.model, pair.tokenizer, oracle(first + plain, block_size=4))
    conversation = Conversation(pair, GenerationOptions(max_tokens=20))
    answer = conversation.answer("Hello")
    yielded = [next(answer).token for _ in range(shown)]
    answer.close()
    assert yielded == plain[:shown] and conversation.stats.generation_tokens == shown
    whole = first + yielded
    assert conversation.tokens == conversation.cache.tokens == whole
    assert len(conversation.cache) == len(whole)
    tokens = [response.token for response in conversation.answer("Why?")]
    assert tokens == cold(pair, whole + prompt_of(pair, "Why?"), 20)
    assert conversation.stats.cached_tokens == len(whole)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("after", [1, 2, 6])
def test_ctrl_c_stops_an_answer_and_keeps_the_session(monkeypatch, chat, pairs, kind, after):
    pair, plain = pairs[kind], conversation_module.stream_text
    calls = []

    def press(*args, **kwargs):
        calls.append(args)
        for i, response in enumerate(plain(*args, **kwargs), start=1):
            if len(calls) == 1 and i == after:
                signal.raise_signal(signal.SIGINT)
            yield response

    monkeypatch.setattr(generating, "stream_text", press)
    handler = signal.getsignal(signal.SIGINT)
    status, out, err, turns = chat("Hello\nWhy?\n", "-m", "12", kind=kind)
    assert status == 0 and signal.getsignal(signal.SIGINT) is handler
    assert len(turns[0]) == after and f"[{after} tokens" in err
    whole = prompt_of(pair, "Hello") + turns[0] + prompt_of(pair, "Why?")
    assert turns[1] == cold(pair, whole, 12)
    assert out.count("\n") >= 2


@pytest.mark.parametrize("kind", KINDS)
def test_ctrl_c_in_a_long_prompt_forgets_the_message(monkeypatch, chat, pairs, kind):
    pair, original, prompts = pairs[kind], command.prefill_progress, []

    @contextmanager
    def progress():
        prompts.append(0)

        def update(done, total):
            if len(prompts) == 2 and done == 16:
                signal.raise_signal(signal.SIGINT)

        with original() as show:
            yield lambda *call: (show(*call), update(*call))

    monkeypatch.setattr(command, "prefill_progress", progress)
    text = "Hello\nA message that takes several chunks of its own\nWhy?\n"
    status, _, err, turns = chat(text, "-m", "9", "--prefill-step-size", "8", kind=kind)
    assert status == 0 and "the message is forgotten" in err
    assert [len(turn) for turn in turns] == [9, 0, 9]
    whole = prompt_of(pair, "Hello") + turns[0] + prompt_of(pair, "Why?")
    assert turns[2] == cold(pair, whole, 9)


def test_a_second_ctrl_c_ends_the_chat(monkeypatch, chat):
    plain = conversation_module.stream_text

    def press(*args, **kwargs):
        for response in plain(*args, **kwargs):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            yield response

    monkeypatch.setattr(generating, "stream_text", press)
    assert chat("Hello\nWhy?\n")[0] == 130
