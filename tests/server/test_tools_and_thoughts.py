"""Tool calls and thoughts are told apart from the answer as mlx_lm.server does it."""

import json
from importlib import import_module
from io import BytesIO
from types import SimpleNamespace

import pytest
from support.serving import Script, Served, chat, joined, save_thinking_pair

job = import_module("mlx_dflash2.server.job")
theirs = import_module("mlx_lm.server")

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": "é"}}</tool_call>'
# What the answer is, after the prompt has opened a thought; and its parts.
TEXTS = {
    "thought and answer": "hm</think>four",
    "thought that never ends": "hm, hm",
    "one call": f"hm</think>wait {CALL}",
    "two calls": f"a</think>{CALL}{CALL}",
    "call and answer": f"a</think>{CALL} done",
    "call in a thought": f"a{CALL}b</think>c",
    "call that is cut short": '</think><tool_call>{"name": "add", "argu',
    "thought again": "a</think>b<think>c</think>d",
    "nothing": "",
    "half a marker": "a</think>b <too",
}


@pytest.fixture(scope="module")
def thinking(tmp_path_factory):
    with Served(save_thinking_pair(tmp_path_factory.mktemp("pair"))) as server:
        yield server


@pytest.fixture
def say(thinking, monkeypatch):
    """What the server makes of a text that the target says: the whole answer, and the chunks."""

    def say(text, **options):
        body = chat("2 + 2?", tools=TOOLS, **options)
        answers = []
        for ask in (thinking.ask, thinking.events):
            script = Script(thinking.provider.tokenizer, text)
            monkeypatch.setattr(job, "make_logits_processors", lambda script=script, **_: [script])
            answers.append(ask(body))
        return answers

    return say


def mlx_lm_says(thinking, text):
    """The message and the reason of mlx_lm.server's own handler, for the same tokens."""
    tokenizer = thinking.provider.tokenizer
    detokenizer = tokenizer.detokenizer
    tokens = tokenizer.encode(text, add_special_tokens=False)
    responses = []
    for token in tokens:
        detokenizer.add_token(token)
        responses.append(theirs.Response(detokenizer.last_segment, token, 0.0, None, ()))
    detokenizer.finalize()
    responses.append(theirs.Response(detokenizer.last_segment, 511, 0.0, "stop", ()))
    machine = theirs.make_text_state_machine(tokenizer, [])
    ctx = theirs.GenerationContext(True, True, tokenizer.tool_parser, machine, "reasoning", [1])
    handler = theirs.APIHandler.__new__(theirs.APIHandler)
    fields = ("requested_model", "requested_draft_model", "adapter", "temperature", "top_p")
    fields += ("top_k", "min_p", "xtc_probability", "xtc_threshold", "logit_bias", "max_tokens")
    fields += ("num_draft_tokens", "seed", "chat_template_kwargs", "created")
    fields += tuple(f"{a}_{b}" for a in ("repetition", "presence", "frequency")
                    for b in ("penalty", "context_size"))  # fmt: skip
    for name in fields:
        setattr(handler, name, None)
    handler.logprobs, handler.top_logprobs, handler.stream = False, -1, False
    handler.request_id, handler.object_type = "x", "chat.completion"
    handler.system_fingerprint, handler.wfile = "f", BytesIO()
    handler.response_generator = SimpleNamespace(generate=lambda *_, **__: (ctx, responses))
    handler._set_completion_headers = handler.end_headers = lambda *_: None
    handler.send_header = lambda *_: None
    handler.handle_completion(SimpleNamespace(tools=TOOLS), [])
    choice = json.loads(handler.wfile.getvalue())["choices"][0]
    return choice["message"], choice["finish_reason"]


def without_ids(message):
    calls = [call["function"] for call in message.get("tool_calls", [])]
    return message | ({"tool_calls": calls} if calls else {})


@pytest.mark.parametrize("name", [n for n in TEXTS if n not in ("half a marker",)])
def test_answers_are_mlx_lm_s(name, say, thinking):
    whole, _ = say(TEXTS[name], max_tokens=200)
    message, reason = mlx_lm_says(thinking, TEXTS[name])
    choice = whole["choices"][0]
    if name == "call that is cut short":
        # mlx-lm drops what it cannot parse, and says that there was a call.
        assert message["content"] is None and reason == "tool_calls"
        assert choice["message"]["content"] == '{"name": "add", "argu'
        assert choice["finish_reason"] == "stop" and "tool_calls" not in choice["message"]
        return
    assert without_ids(choice["message"]) == without_ids(message)
    assert choice["finish_reason"] == reason


def test_text_that_might_have_become_a_marker_is_not_lost(say):
    whole, chunks = say(TEXTS["half a marker"], max_tokens=200)
    assert whole["choices"][0]["message"]["content"] == "b <too"
    assert joined(chunks)["content"] == "b <too"


@pytest.mark.parametrize("name", TEXTS)
def test_chunks_add_up(name, say):
    whole, chunks = say(TEXTS[name], max_tokens=200)
    choice = whole["choices"][0]
    assert without_ids(joined(chunks)) == without_ids(choice["message"])
    assert chunks[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]


def test_calls_have_ids_and_arguments_in_json(say):
    whole, _ = say(TEXTS["two calls"], max_tokens=200)
    choice = whole["choices"][0]
    first, second = choice["message"]["tool_calls"]
    assert first["id"] != second["id"] and first["type"] == "function"
    assert first["function"]["name"] == "add"
    assert json.loads(first["function"]["arguments"]) == {"a": 1, "b": "é"}
    assert choice["finish_reason"] == "tool_calls"


def test_an_answer_that_is_cut_short_is_no_call(say):
    whole, _ = say(TEXTS["one call"], max_tokens=20)
    choice = whole["choices"][0]
    assert choice["finish_reason"] == "length" and "tool_calls" not in choice["message"]


def test_calls_go_back_into_the_template(thinking):
    """A client sends arguments as text; templates want the object."""
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    answer = thinking.ask({"messages": messages, "tools": TOOLS, "max_tokens": 2})
    assert answer["usage"]["completion_tokens"] == 2


def test_a_completion_is_not_split(thinking, monkeypatch):
    script = Script(thinking.provider.tokenizer, "a<think>b</think>c")
    monkeypatch.setattr(job, "make_logits_processors", lambda **_: [script])
    answer = thinking.ask({"prompt": "x", "max_tokens": 99}, "/v1/completions")
    assert answer["choices"][0]["text"] == "a<think>b</think>c"


def test_a_prompt_that_the_template_refuses(thinking):
    status, error = thinking.refusal(chat("forbidden"))
    assert status == 400 and "Not this." in error["message"] and error["param"] == "messages"
