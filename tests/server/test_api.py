"""Answers are those of the library, in OpenAI's form, whole and in chunks."""

import json

import mlx.core as mx
import pytest
from support.serving import chat, text_of

from mlx_dflash2 import generate, make_logits_processors, make_sampler
from mlx_dflash2.decode.text import encode_prompt
from mlx_dflash2.generate import dflash_generate_step

TEXT = "abc abd hello"


@pytest.fixture(scope="module")
def drafted(model_folders):
    """A server whose drafts are verified in every round."""
    from support.serving import Served

    with Served(model_folders, "--verify-width", 4) as server:
        yield server


def library_text(served, text, max_tokens=24, **options):
    """What the library says to a text."""
    pair = served.provider.pair
    return generate(
        pair.model,
        pair.tokenizer,
        text,
        draft_model=pair.drafter,
        max_tokens=max_tokens,
        verify_width=4,
        **options,
    )


def complete(served, text=TEXT, **options):
    """The choice and the timings of a completion."""
    body = {"prompt": text, "max_tokens": 24} | options
    answer = served.ask(body, "/v1/completions")
    return answer["choices"][0], answer["timings"]


def test_a_chat_is_the_template_s_text(drafted):
    messages = chat("hello")["messages"]
    tokenizer = drafted.provider.tokenizer
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    answer = drafted.ask(chat("hello", max_tokens=12))
    assert answer["object"] == "chat.completion" and answer["model"] == "target"
    (choice,) = answer["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": library_text(drafted, prompt, 12),
    }
    assert choice["finish_reason"] == "length" and choice["logprobs"] is None
    assert answer["usage"]["prompt_tokens"] == len(prompt)


def test_a_completion_is_the_library_s(drafted):
    answer = drafted.ask({"prompt": TEXT, "max_tokens": 24}, "/v1/completions")
    assert answer["object"] == "text_completion"
    (choice,) = answer["choices"]
    assert choice["text"] == library_text(drafted, TEXT)
    ids = encode_prompt(drafted.provider.tokenizer, TEXT).tolist()
    assert complete(drafted, ids)[0]["text"] == choice["text"]
    assert complete(drafted, [TEXT])[0]["text"] == choice["text"]


@pytest.mark.parametrize(
    "options, sampler, processors",
    [
        ({"temperature": 0.9, "seed": 3}, {"temp": 0.9}, {}),
        ({"temperature": 1.2, "seed": 4, "top_p": 0.6}, {"temp": 1.2, "top_p": 0.6}, {}),
        ({"temperature": 1.2, "seed": 4, "top_k": 5}, {"temp": 1.2, "top_k": 5}, {}),
        ({"temperature": 1.2, "seed": 4, "min_p": 0.3}, {"temp": 1.2, "min_p": 0.3}, {}),
        (
            {"temperature": 1, "seed": 5, "xtc_probability": 0.7, "xtc_threshold": 0.01},
            {"temp": 1, "xtc_probability": 0.7, "xtc_threshold": 0.01},
            {},
        ),
        ({"logit_bias": {"300": 9, "17": -5.5}}, {}, {"logit_bias": {300: 9.0, 17: -5.5}}),
        (
            {"repetition_penalty": 1.8, "repetition_context_size": 9},
            {},
            {"repetition_penalty": 1.8, "repetition_context_size": 9},
        ),
        ({"presence_penalty": 2.0}, {}, {"presence_penalty": 2.0}),
        (
            {"frequency_penalty": 1.5, "frequency_context_size": 30},
            {},
            {"frequency_penalty": 1.5, "frequency_context_size": 30},
        ),
    ],
)
def test_sampling_options_of_a_request(options, sampler, processors, drafted):
    """The tokens are those of a call with the same options, whatever is cached."""
    tokenizer = drafted.provider.tokenizer
    special = tokenizer.encode("\n") + list(tokenizer.eos_token_ids)
    expected = library_text(
        drafted,
        TEXT,
        sampler=make_sampler(**sampler, xtc_special_tokens=special),
        logits_processors=make_logits_processors(**processors),
        seed=options.get("seed"),
    )
    choice, timings = complete(drafted, **options)
    assert choice["text"] == expected != library_text(drafted, TEXT)
    assert timings["draft_n"] > 0
    # The prompt is in the cache now, and penalties still see all of it. A seed's draws depend on
    # what the drafter's window has forgotten, so they do not go on from there.
    choice, timings = complete(drafted, **options)
    assert choice["text"] == expected and (timings["cache_n"] > 0) is ("seed" not in options)


def test_without_a_seed_answers_differ(served):
    texts = {complete(served, temperature=1.5)[0]["text"] for _ in range(4)}
    assert len(texts) > 1


@pytest.mark.parametrize("stop", ["text", ["no", "text"]])
def test_stop_strings(stop, drafted):
    whole = library_text(drafted, TEXT)
    word = whole[6:9]
    stop = [word if s == "text" else "~no~" for s in stop] if isinstance(stop, list) else word
    choice, timings = complete(drafted, stop=stop)
    assert choice["text"] == whole[: whole.index(word)] and choice["finish_reason"] == "stop"
    assert timings["predicted_n"] < 24
    chunks = drafted.events({"prompt": TEXT, "max_tokens": 24, "stop": stop}, "/v1/completions")
    assert "".join(c["choices"][0]["text"] for c in chunks) == choice["text"]


@pytest.mark.parametrize("off", [{"draft": False}, {"draft_model": None}, {"num_draft_tokens": 0}])
def test_drafts_can_be_switched_off(off, drafted):
    """The same tokens, from the same target, whose caches are used again."""
    target = drafted.provider.model
    drafts, timings = complete(drafted)
    assert timings["draft_n"] > 0
    plain, timings = complete(drafted, **off)
    assert plain == drafts and timings["draft_n"] == timings["draft_n_accepted"] == 0
    assert timings["cache_n"] > 0 and drafted.provider.model is target


def test_fewer_drafts(drafted):
    choice, timings = complete(drafted, num_draft_tokens=1)
    assert choice["text"] == library_text(drafted, TEXT)
    assert 0 < timings["draft_n"] <= timings["rounds"]
    names = ("default_model", "drafter")
    assert all(complete(drafted, draft_model=name)[1]["draft_n"] > 0 for name in names)


def test_drafts_that_are_wanted_where_they_are_off(serve):
    server = serve("--num-draft-tokens", 0)
    assert complete(server)[1]["draft_n"] == 0
    assert complete(server, num_draft_tokens=2)[1]["draft_n"] > 0


def test_counts(drafted):
    """OpenAI's names and llama.cpp's agree, and add up."""
    answer = drafted.ask({"prompt": "counted words", "max_tokens": 20}, "/v1/completions")
    usage, timings = answer["usage"], answer["timings"]
    details = usage["completion_tokens_details"]
    assert usage["prompt_tokens"] == len(drafted.provider.tokenizer.encode("counted words"))
    assert usage["completion_tokens"] == timings["predicted_n"] == 20
    assert usage["total_tokens"] == usage["prompt_tokens"] + 20
    assert usage["prompt_tokens_details"] == {"cached_tokens": timings["cache_n"]}
    assert timings["cache_n"] + timings["prompt_n"] == usage["prompt_tokens"]
    accepted = details["accepted_prediction_tokens"]
    assert accepted == timings["draft_n_accepted"]
    assert accepted + details["rejected_prediction_tokens"] == timings["draft_n"] > 0
    # The prompt gives the first token, and every round one more than it accepts.
    assert 1 + accepted + timings["rounds"] == 20
    assert timings["acceptance_length"] == pytest.approx(19 / timings["rounds"])
    assert timings["prompt_ms"] > 0 and timings["predicted_ms"] > 0


@pytest.mark.parametrize("count", [1, 2, 3, 24])
def test_chunks_add_up_to_the_answer(count, drafted):
    body = chat("some chunks", max_tokens=count)
    whole = drafted.ask(body)
    chunks = drafted.events(body | {"stream_options": {"include_usage": True}})
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert text_of(chunks) == whole["choices"][0]["message"]["content"]
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert len({c["id"] for c in chunks}) == 1
    *parts, last, usage = chunks
    assert all(c["choices"][0]["finish_reason"] is None for c in parts)
    assert last["choices"][0]["finish_reason"] == "length" and "timings" in last
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == count
    # Without being asked for, there is no chunk of counts.
    assert "usage" not in drafted.events(body)[-1]


def test_an_eos_token_ends_the_answer(drafted):
    """It is counted, but neither shown nor lost from what is cached."""
    choice, timings = complete(drafted, "an end", logit_bias={"511": 100})
    assert choice["text"] == "" and choice["finish_reason"] == "stop"
    assert timings["predicted_n"] == 1


@pytest.mark.parametrize("top", [0, 3])
def test_log_probabilities(top, drafted):
    tokenizer, pair = drafted.provider.tokenizer, drafted.provider.pair
    steps = dflash_generate_step(
        encode_prompt(tokenizer, TEXT), pair.model, pair.drafter, max_tokens=9
    )
    steps = [(token, row) for token, row, _ in steps]
    body = {"prompt": TEXT, "max_tokens": 9, "logprobs": top}
    found = drafted.ask(body, "/v1/completions")["choices"][0]["logprobs"]
    expected = [row[token].item() for token, row in steps]
    assert found["token_logprobs"] == pytest.approx(expected, abs=1e-4)
    assert found["tokens"] == [tokenizer.decode([token]) for token, _ in steps]
    assert all(len(best) <= top for best in found["top_logprobs"])
    body = {"prompt": TEXT, "max_tokens": 9, "logprobs": True, "top_logprobs": top}
    chunks = drafted.events(body, "/v1/completions")
    parts = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
    assert [x for part in parts for x in part["token_logprobs"]] == found["token_logprobs"]
    assert [x for part in parts for x in part["text_offset"]] == found["text_offset"]
    for _, row in steps:
        best = mx.sort(row)[::-1][:top].tolist()
        assert len(set(best)) == top


def test_log_probabilities_of_a_chat(drafted):
    body = chat("hello", max_tokens=6, logprobs=True, top_logprobs=4)
    choice = drafted.ask(body)["choices"][0]
    content = choice["logprobs"]["content"]
    assert len(content) == 6
    for entry in content:
        values = [top["logprob"] for top in entry["top_logprobs"]]
        # At temperature 0 the token is the most likely one.
        assert values == sorted(values, reverse=True) and entry["logprob"] == values[0]
        assert bytes(entry["bytes"]).decode() == entry["token"] == entry["top_logprobs"][0]["token"]
    chunks = drafted.events(body)
    parts = [c["choices"][0].get("logprobs") for c in chunks]
    assert [x for part in parts if part for x in part["content"]] == content


def test_models_and_health(served):
    listed = served.ask(None, "/v1/models")
    (model,) = listed["data"]
    assert listed["object"] == "list" and model["id"] == "target"
    assert model["draft_model"] == "drafter" and model["context_length"] == 4096
    assert served.ask(None, "/v1/models/target") == model
    folder = served.args.model
    assert served.ask(None, f"/v1/models/{folder}") == model
    assert served.ask(None, "/health") == {"status": "ok"}


@pytest.mark.parametrize("name", ["target", "default_model", None])
def test_names_of_the_model(name, served):
    answer = served.ask(chat("hello", max_tokens=1, model=name))
    assert answer["model"] == "target"


def test_paths_with_and_without_the_version(served):
    body = chat("hello", max_tokens=3)
    answers = [served.ask(body, path) for path in ("/v1/chat/completions", "/chat/completions?x=1")]
    assert answers[0]["choices"] == answers[1]["choices"]


def test_an_answer_ends_where_the_context_does(serve):
    """A prompt that leaves room for three tokens gets three."""
    server = serve()
    server.provider.model.args.max_position_embeddings = 30
    tokens = [5, 6, 7] * 9
    choice, timings = complete(server, tokens, max_tokens=20)
    assert choice["finish_reason"] == "length" and timings["predicted_n"] == 3
    status, error = server.refusal({"prompt": tokens + [5] * 3}, "/v1/completions")
    assert status == 400 and error["code"] == "context_length_exceeded"
    assert "30 tokens but the model's context has 30" in error["message"]


def test_a_target_without_a_template(serve, model_folders, tmp_path):
    """The messages are written with the roles' own words, as in mlx-lm."""
    folders = tmp_path
    (folders / "target").symlink_to(model_folders / "raw")
    (folders / "drafter").symlink_to(model_folders / "drafter")
    server = serve(folders=folders)
    body = chat("hi", max_tokens=4, role_mapping={"user": "U: ", "assistant": "A:", "stop": "|"})
    answer = server.ask(body)
    expected = complete(server, "U: hi|A:", max_tokens=4)[0]["text"]
    assert answer["choices"][0]["message"]["content"] == expected
    assert json.dumps(answer)
