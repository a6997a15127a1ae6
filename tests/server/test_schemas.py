"""Answers that have to be JSON are, with drafts, in chunks, and after thoughts."""

import json
import sys
from typing import Literal

import openai
import pydantic
import pytest
from support.serving import Served, chat, joined, save_thinking_pair, text_of
from support.tiny import DENSE, HYBRID

from mlx_dflash2.server import job as jobs

# Every object of this schema is short, and has no room for spaces.
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["bee", "hill"]},
        "sizes": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
    },
    "required": ["kind", "sizes"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}


def check(text):
    found = json.loads(text)
    assert set(found) == {"kind", "sizes"} and found["kind"] in ("bee", "hill")
    assert 2 <= len(found["sizes"]) <= 3 and all(type(x) is bool for x in found["sizes"])


@pytest.mark.parametrize("options", [{}, {"temperature": 1.5, "seed": 3}, {"draft": False}])
def test_a_schema(options, served):
    body = chat("a thing, please", max_tokens=120, response_format=FORMAT, **options)
    answer = served.ask(body)
    (choice,) = answer["choices"]
    check(choice["message"]["content"])
    assert choice["finish_reason"] == "stop"
    assert text_of(served.events(body)) == choice["message"]["content"]
    # What the schema forces is drafted for free, where drafts are wanted.
    assert (answer["timings"]["draft_n_accepted"] > 0) is ("draft" not in options)


def test_drafts_do_not_change_the_answer(served):
    body = chat("a thing, please", max_tokens=120, response_format=FORMAT)
    answers = [served.ask(body | options) for options in ({}, {"draft": False})]
    assert answers[0]["choices"] == answers[1]["choices"]


def test_any_object(served):
    body = chat("an object", max_tokens=60, response_format={"type": "json_object"})
    text = served.ask(body)["choices"][0]["message"]["content"]
    assert text.lstrip().startswith("{")
    for kind in ({"type": "text"}, None):
        plain = served.ask(chat("an object", max_tokens=9, response_format=kind))
        assert plain["choices"] == served.ask(chat("an object", max_tokens=9))["choices"]


def test_log_probabilities_are_json(served):
    """Those of forbidden tokens, too."""
    body = chat("a thing", max_tokens=120, response_format=FORMAT, logprobs=True, top_logprobs=5)
    status, _, text = served.request("/v1/chat/completions", body)
    assert status == 200 and "Infinity" not in text and "-9999.0" in text
    content = json.loads(text)["choices"][0]["logprobs"]["content"]
    assert all(entry["logprob"] > -9999 for entry in content)


@pytest.mark.parametrize("kind", [DENSE, HYBRID])
def test_thoughts_are_free(kind, tmp_path, monkeypatch):
    """The schema holds from their end on."""
    with Served(save_thinking_pair(tmp_path, kind)) as server:
        tokenizer = server.provider.tokenizer
        end = tokenizer.think_end_tokens

        def after_a_while(tokens, logits, start=[]):  # noqa: B006
            import mlx.core as mx

            start.append(tokens.size)
            if tokens.size - start[0] == 5:
                return mx.where(mx.arange(logits.shape[-1]) == end[0], logits, -mx.inf)
            return logits

        monkeypatch.setattr(jobs, "make_logits_processors", lambda **_: [after_a_while])
        answer = server.ask(chat("a thing", max_tokens=120, response_format=FORMAT))
        message = answer["choices"][0]["message"]
        assert message["reasoning"] and not message["reasoning"].startswith("{")
        check(message["content"])
        chunks = server.events(chat("a thing", max_tokens=2, response_format=FORMAT))
        assert joined(chunks)["role"] == "assistant"


@pytest.mark.parametrize(
    "given, words",
    [
        ("json_object", "`response_format` has to be an object"),
        ({"type": "xml"}, "`response_format.type` is 'xml' but has to be"),
        ({"type": "json_schema"}, "`response_format.json_schema.schema` has to be an object"),
        (
            {"type": "json_schema", "json_schema": {"schema": {"type": "nope"}}},
            "The json_schema does not compile: Invalid type: nope",
        ),
        (
            {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/no/where"}}},
            "The json_schema does not compile",
        ),
    ],
)
def test_schemas_that_are_refused(given, words, served):
    status, error = served.refusal(chat("x", response_format=given))
    assert status == 400 and error["param"] == "response_format" and words in error["message"]


def test_a_server_without_llguidance(serve, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlx_dflash2.decode.grammar", None)
    server = serve()
    status, error = server.refusal(chat("x", response_format=FORMAT))
    assert status == 400 and "mlx-dflash2[structured]" in error["message"]
    assert server.ask(chat("x", max_tokens=2))["usage"]["completion_tokens"] == 2


class Thing(pydantic.BaseModel):
    """What openai's client makes a schema of, and parses."""

    kind: Literal["bee", "hill"]
    good: bool


def test_openai_s_client_parses(served):
    with openai.OpenAI(base_url=served.url, api_key="none", max_retries=0, timeout=60) as client:
        answer = client.chat.completions.parse(
            model="target",
            messages=[{"role": "user", "content": "a thing"}],
            response_format=Thing,
            max_tokens=200,
            # The tiny target likes spaces, which this schema allows between its parts.
            logit_bias={token: -100 for token in spaces(served)},
        )
    thing = answer.choices[0].message.parsed
    assert thing.kind in ("bee", "hill") and thing.good in (True, False)


def spaces(served):
    tokenizer = served.provider.tokenizer
    return [str(i) for i in range(512) if not tokenizer.decode([i]).strip()]
