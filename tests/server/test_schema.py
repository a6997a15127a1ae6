"""Each field is checked, and named if it is wrong; nothing is dropped in silence."""

import json
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.serving import chat

from mlx_dflash2.server.errors import ApiError
from mlx_dflash2.server.schema import Defaults, parse_request

DEFAULTS = Defaults(
    max_tokens=99,
    temperature=0.5,
    top_p=0.9,
    top_k=3,
    min_p=0.1,
    vocab_size=500,
    max_draft_tokens=7,
    draft_names=frozenset({"drafter"}),
    adapter="ours",
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def parse(chat_route=True, **options):
    body = chat("hello") if chat_route else {"prompt": "hello"}
    return parse_request(body | options, chat_route, DEFAULTS)


def refusal(body, chat_route=True):
    with pytest.raises(ApiError) as caught:
        parse_request(body, chat_route, DEFAULTS)
    assert "\n" not in caught.value.message
    return caught.value


NUMBERS = {
    "temperature": (0, math.inf),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "xtc_probability": (0, 1),
    "xtc_threshold": (0, 0.5),
    "repetition_penalty": (0, math.inf),
}
INTEGERS = {
    "max_tokens": (1, math.inf),
    "max_completion_tokens": (1, math.inf),
    "top_k": (0, 499),
    "seed": (0, 2**64 - 1),
    "num_draft_tokens": (0, 7),
    "top_logprobs": (-1, 20),
    "repetition_context_size": (0, math.inf),
    "presence_context_size": (0, math.inf),
    "frequency_context_size": (0, math.inf),
}
ANY_NUMBER = ("presence_penalty", "frequency_penalty")


@pytest.mark.parametrize("name", [*NUMBERS, *INTEGERS, *ANY_NUMBER])
def test_numbers(name):
    low, high = (NUMBERS | INTEGERS).get(name, (-math.inf, math.inf))
    wrong = ["1", [1], {}, True, 10**400, -(10**400)]
    wrong += [low - 1] if low > -math.inf else []
    wrong += [high + 1] if high < math.inf else []
    wrong += [1.5] if name in INTEGERS else []
    for value in wrong:
        error = refusal(chat("hello", **{name: value}))
        assert error.status == 400 and error.param == name and name in error.message
    for value in (x for x in (low, high, 1 if low <= 1 <= high else low, None)):
        if value is None or abs(value) < math.inf:
            parse(**{name: value})


WRONG = {
    "messages": [None, [], "hello", [1], [{}], [{"role": 1}], {"role": "user"}],
    "messages[0].content": [3, {"text": "x"}, True, [1], ["x"], [{"type": "text"}]],
    "messages[0].tool_calls": [3, [1], [{}], [{"function": {}}], [{"function": {"name": 3}}]],
    "model": [1, [], True],
    "draft": ["no", 0],
    "stream": ["true", 1],
    "stream_options": [True, "x"],
    "include_usage": [1],
    "stop": [1, [1], [""], "", ["x"] * 17, ["x" * 1025], {"a": 1}],
    "logit_bias": [[], {"a": 1}, {"-1": 1}, {"500": 1}, {"1.0": 1}, {"²": 1}],
    "logprobs": ["yes", 3],
    "tools": [{}, [1], [{}], [{"function": {}}]],
    "tool_choice": ["required", {"type": "function", "function": {"name": "f"}}, 3],
    "role_mapping": [[], {"user": 1}],
    "chat_template_kwargs": [[], {"tokenize": False}, {"chat_template": "{{ x }}"}],
    "adapters": ["theirs", 3],
    "n": [2, "1"],
    "suffix": ["x"],
    "functions": [[{}]],
    "modalities": [["audio"]],
    "web_search_options": [{}],
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name):
    for value in WRONG[name]:
        body = chat("hello")
        if name.startswith("messages[0]."):
            body["messages"][0][name.partition(".")[2]] = value
        elif name == "include_usage":
            body["stream_options"] = {name: value}
        else:
            body[name] = value
        error = refusal(body)
        assert error.status == 400, (name, value)
        assert error.param.startswith(name), (error.param, value)


@pytest.mark.parametrize(
    "prompt", [None, "", [], [""], ["a", "b"], [500], [-1], [1.0], [True], 3, {}, [[1]]]
)
def test_prompts_that_are_refused(prompt):
    error = refusal({"prompt": prompt}, chat_route=False)
    assert error.status == 400 and error.param == "prompt"


@pytest.mark.parametrize("kind", ["image_url", "input_image", "input_audio", "file"])
def test_only_text_is_drafted_for(kind):
    content = [{"type": "text", "text": "look"}, {"type": kind, kind: {"url": "http://x/y.png"}}]
    error = refusal({"messages": [{"role": "user", "content": content}]})
    assert "only text is supported" in error.message and kind in error.message


@pytest.mark.parametrize("arguments", ["{", "nonsense", "[" * 100_000])
def test_arguments_of_earlier_calls_are_json(arguments):
    call = {"function": {"name": "f", "arguments": arguments}}
    error = refusal({"messages": [{"role": "assistant", "tool_calls": [call]}]})
    assert error.status == 400 and "not valid JSON" in error.message


def test_what_a_request_leaves_out():
    request = parse()
    assert request.max_tokens == 99 and request.seed is None and not request.stream
    assert request.sampling == {
        "temp": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "min_p": 0.1,
        "xtc_probability": 0.0,
        "xtc_threshold": 0.1,
    }
    assert request.stop == [] and not request.logprobs and request.verify_width is None
    assert request.tools is None and request.processors["logit_bias"] is None
    # null is the same as nothing.
    named = dict.fromkeys((*NUMBERS, *INTEGERS, *ANY_NUMBER, "stop", "tools", "stream", "model"))
    assert parse(**named) == request


def test_what_a_request_says():
    request = parse(
        max_tokens=5,
        max_completion_tokens=6,
        stop="x",
        logit_bias={"7": 2},
        tools=[TOOL],
        tool_choice="auto",
        top_logprobs=2,
        stream=True,
        stream_options={"include_usage": True},
        adapters="ours",
        user="somebody",
    )
    assert request.max_tokens == 6 and request.stop == ["x"]
    assert request.processors["logit_bias"] == {7: 2.0} and request.tools == [TOOL]
    assert request.logprobs and request.top_logprobs == 2
    assert request.stream and request.include_usage
    assert parse(tools=[TOOL], tool_choice="none").tools is None
    assert parse(chat_route=False, logprobs=0).logprobs
    assert not parse(chat_route=False, logprobs=False).logprobs


@pytest.mark.parametrize(
    "options, width",
    [
        ({}, None),
        ({"draft": True}, None),
        ({"draft": False}, 1),
        ({"draft_model": None}, 1),
        ({"draft_model": "drafter"}, None),
        ({"draft_model": "drafter", "draft": False}, 1),
        ({"num_draft_tokens": 0}, 1),
        ({"num_draft_tokens": 3}, 4),
        ({"num_draft_tokens": 3, "draft": False}, 1),
    ],
)
def test_drafts(options, width):
    assert parse(**options).verify_width == width


def test_drafts_where_they_are_off():
    off = Defaults(**(vars(DEFAULTS) | {"drafts": False}))
    for options, width in (({}, 1), ({"draft": True}, None), ({"num_draft_tokens": 2}, 3)):
        assert parse_request(chat("hello", **options), True, off).verify_width == width


def test_another_drafter_is_not_served():
    error = refusal(chat("hello", draft_model="other"))
    assert error.status == 404 and error.code == "model_not_found"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
FIELDS = [*NUMBERS, *INTEGERS, *ANY_NUMBER, *(name for name in WRONG if "." not in name)]


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.booleans(), st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4))
def test_any_json_is_taken_or_refused(chat_route, options):
    """Nothing else comes out than a request or an error of the client's."""
    body = (chat("hello") if chat_route else {"prompt": "hello"}) | options
    try:
        parse_request(json.loads(json.dumps(body)), chat_route, DEFAULTS)
    except ApiError as error:
        assert 400 <= error.status < 500 and error.body()["error"]["message"]
