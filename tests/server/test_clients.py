"""Several clients at once, and clients that people use."""

import json
import random
import resource
import shutil
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.saved_models import embedded_target
from support.serving import Script, Served, chat, raw_request, save_thinking_pair, text_of

from mlx_dflash2 import generate
from mlx_dflash2.decode.loop import Loop
from mlx_dflash2.server import job as jobs

ROUTE = "/v1/chat/completions"
WORDS = "a bee in a cold and windy corner of the hill".split()


@pytest.fixture(scope="module")
def shared(model_folders):
    with Served(model_folders, "--prompt-cache-size", 4) as server:
        yield server


def library(server, text, max_tokens=8):
    """What the library says to a message."""
    pair = server.provider.pair
    messages = [{"role": "user", "content": text}]
    prompt = pair.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    return generate(
        pair.model, pair.tokenizer, prompt, draft_model=pair.drafter, max_tokens=max_tokens
    )


def test_clients_share_the_rounds(serve):
    """Answers are those of one after the other, in far fewer passes."""
    server = serve()
    texts = [f"{word} {i}" for i, word in enumerate(WORDS)]
    expected = [library(server, text, 30) for text in texts]
    barrier = threading.Barrier(len(texts))

    def ask(text):
        barrier.wait(30)
        return server.ask(chat(text, max_tokens=30))

    with ThreadPoolExecutor(len(texts)) as pool:
        answers = list(pool.map(ask, texts))
    assert [a["choices"][0]["message"]["content"] for a in answers] == expected
    stats = server.service.generator.stats
    assert stats.rounds > 2 * stats.passes
    assert sum(a["timings"]["rounds"] for a in answers) == stats.rounds


@pytest.mark.parametrize("size", [1, 64])
def test_a_second_client_does_not_wait_for_the_first(size, serve, monkeypatch):
    """Its first token comes within two rounds of the first one's, and its own prompt's chunks."""
    server = serve("--prefill-step-size", 64)
    happened, run, first = [], Loop.next_round, Loop.first_token

    def next_round(self, sequences, *args):
        happened.append("round")
        time.sleep(0.01)
        return run(self, sequences, *args)

    def first_token(self, *args):
        happened.append("first")
        return first(self, *args)

    monkeypatch.setattr(Loop, "next_round", next_round)
    monkeypatch.setattr(Loop, "first_token", first_token)
    submitted, submit = [], server.service.generator.submit

    def noted(job):
        submit(job)
        submitted.append(len(happened))

    monkeypatch.setattr(server.service.generator, "submit", noted)
    with ThreadPoolExecutor() as pool:
        running = pool.submit(server.ask, chat("first", max_tokens=150))
        while happened.count("round") < 5:
            time.sleep(0.005)
        second = server.ask(chat("word " * size, max_tokens=3))
        tokens = second["usage"]["prompt_tokens"]
        assert running.result()["usage"]["completion_tokens"] == 150
    between = happened[submitted[1] :]
    waited = between[: between.index("first")].count("round")
    assert waited <= 2 + tokens // 64


def test_options_do_not_leak_to_the_neighbor(shared):
    """Seeds, penalties and stops of one request change nothing of another's answer."""
    plain = library(shared, "some words", 20)
    body = chat("some words", max_tokens=20)
    others = [
        {"temperature": 1.3, "seed": 1},
        {"repetition_penalty": 1.9},
        {"stop": [plain[3:5]]},
        {"logit_bias": {"300": 50}},
        {"draft": False},
        {"num_draft_tokens": 2},
        {"logprobs": True, "top_logprobs": 2},
    ]
    alone = [shared.ask(body | options)["choices"] for options in others]
    with ThreadPoolExecutor(2 * len(others)) as pool:
        together = [pool.submit(shared.ask, body | options) for options in others]
        plains = [pool.submit(shared.ask, body) for _ in others]
        for found, expected in zip(together, alone, strict=True):
            choice, expected = found.result()["choices"][0], expected[0]
            assert choice["message"] == expected["message"]
            assert choice["finish_reason"] == expected["finish_reason"]
        for found in plains:
            assert found.result()["choices"][0]["message"]["content"] == plain


def metrics_of(server):
    """Every sample by its name and labels."""
    status, headers, text = server.request("/metrics")
    assert status == 200 and headers["Content-Type"].startswith("text/plain; version=")
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.name.startswith("mlx_dflash2_") and family.documentation
        for sample in family.samples:
            found[sample.name.removeprefix("mlx_dflash2_"), *sample.labels.values()] = sample.value
    return found


def test_metrics_add_up(serve):
    server = serve("--verify-width", 4)
    body = chat("counted words", max_tokens=20)
    answers = [server.ask(body) for _ in range(3)]
    server.refusal({})
    server.request("/nowhere")
    found = metrics_of(server)
    usage = [answer["usage"] for answer in answers]
    timings = [answer["timings"] for answer in answers]
    assert found["requests_total", ROUTE, "200"] == 3
    assert found["requests_total", ROUTE, "400"] == 1
    assert found["requests_total", "other", "404"] == 1
    assert found["prompt_tokens_total",] == sum(u["prompt_tokens"] for u in usage)
    assert found["generated_tokens_total",] == 60
    assert found["cached_tokens_total",] == sum(t["cache_n"] for t in timings) > 0
    assert found["cache_hits_total",] == 2 and found["cache_misses_total",] == 1
    assert found["drafted_tokens_total",] == sum(t["draft_n"] for t in timings) > 0
    assert found["accepted_tokens_total",] == sum(t["draft_n_accepted"] for t in timings)
    assert found["rounds_total",] == found["passes",] == sum(t["rounds"] for t in timings)
    assert found["acceptance_length_count",] == found["first_token_seconds_count",] == 3
    lengths = sum(t["acceptance_length"] for t in timings)
    assert found["acceptance_length_sum",] == pytest.approx(lengths)
    assert found["parked_passes",] == found["hangups_total",] == found["draft_failures_total",] == 0
    assert found["requests_waiting",] == found["requests_decoding",] == 0
    lru = server.service.generator.store.lru
    assert found["prompt_cache_entries",] == len(lru) == 1
    assert found["prompt_cache_bytes",] == lru.nbytes > 0


def test_metrics_of_a_parked_controller(serve):
    """A drafter that is never right is soon left alone, and that can be seen."""
    server = serve()
    server.ask(chat("hello", max_tokens=60))
    found = metrics_of(server)
    assert 0 < found["parked_passes",] <= found["passes",]


@pytest.fixture(scope="module")
def thinking(tmp_path_factory):
    folder = save_thinking_pair(tmp_path_factory.mktemp("pair"))
    with Served(folder, "--api-key", "k") as server:
        yield server


@pytest.fixture
def client(thinking):
    with openai.OpenAI(base_url=thinking.url, api_key="k", max_retries=0, timeout=60) as client:
        yield client


def test_openai_s_client(client):
    (model,) = client.models.list().data
    assert model.id == "target" and client.models.retrieve("target") == model
    messages = [{"role": "user", "content": "hello"}]
    options = {"model": model.id, "messages": messages, "max_tokens": 9, "temperature": 1.0}
    answers = [client.chat.completions.create(seed=5, **options) for _ in range(2)]
    assert answers[0].choices == answers[1].choices
    usage = answers[0].usage
    assert usage.completion_tokens == 9
    assert usage.completion_tokens_details.accepted_prediction_tokens >= 0
    again = client.chat.completions.create(**options)
    assert again.usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1
    stream = client.chat.completions.create(
        seed=5, stream=True, stream_options={"include_usage": True}, **options
    )
    chunks = list(stream)
    text = "".join(
        (c.choices[0].delta.content or "") + (getattr(c.choices[0].delta, "reasoning", None) or "")
        for c in chunks
        if c.choices
    )
    message = answers[0].choices[0].message
    assert text == (message.content or "") + (getattr(message, "reasoning", None) or "")
    assert chunks[-1].usage.completion_tokens == 9
    text = client.completions.create(model="target", prompt="abc", max_tokens=4)
    assert text.usage.completion_tokens == 4 and text.choices[0].finish_reason == "length"


def test_tools_of_openai_s_client(client, thinking, monkeypatch):
    said = '</think><tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    messages = [{"role": "user", "content": "1 + 1?"}]
    options = {"model": "target", "messages": messages, "tools": tools, "max_tokens": 99}
    for stream in (False, True):
        script = Script(thinking.provider.tokenizer, said)
        monkeypatch.setattr(jobs, "make_logits_processors", lambda script=script, **_: [script])
        if stream:
            with client.chat.completions.stream(
                model="target", messages=messages, tools=tools, max_tokens=99
            ) as events:
                events.until_done()
                choice = events.get_final_completion().choices[0]
        else:
            choice = client.chat.completions.create(**options).choices[0]
        (call,) = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls" and call.id
        assert call.function.name == "add" and json.loads(call.function.arguments) == {"a": 1}


def test_errors_of_openai_s_client(client, thinking):
    messages = [{"role": "user", "content": "hello"}]
    with pytest.raises(openai.NotFoundError) as error:
        client.chat.completions.create(model="gpt-9", messages=messages)
    assert error.value.code == "model_not_found" and error.value.param == "model"
    with pytest.raises(openai.BadRequestError, match="`temperature` is -1"):
        client.chat.completions.create(model="target", messages=messages, temperature=-1)
    other = openai.OpenAI(base_url=thinking.url, api_key="wrong", max_retries=0)
    with other, pytest.raises(openai.AuthenticationError):
        other.models.list()


def test_curl(shared):
    words = [shutil.which("curl"), "-sS", "--fail", "--max-time", "60"]
    body = json.dumps(chat("hello", max_tokens=5))
    url = f"{shared.url}/chat/completions"
    answer = subprocess.run([*words, url, "-d", body], capture_output=True, check=True)
    assert json.loads(answer.stdout)["usage"]["completion_tokens"] == 5
    body = json.dumps(chat("hello", max_tokens=5, stream=True))
    answer = subprocess.run([*words, "-N", url, "-d", body], capture_output=True, check=True)
    events = answer.stdout.decode().split("\n\n")
    assert events[-2] == "data: [DONE]" and events[-1] == ""
    # A body of more than a megabyte makes curl ask before it sends.
    large = json.dumps(chat("x " * 600_000))
    found = subprocess.run(
        [*words[:2], url, "-d", "@-"], input=large.encode(), capture_output=True, check=True
    )
    assert json.loads(found.stdout)["error"]["code"] == "context_length_exceeded"


def hang_up(server, body, seconds):
    """Send a request, and go away after a while."""
    with server.connect() as client:
        client.sendall(raw_request(body))
        time.sleep(seconds)
        if seconds < 0.01:
            # In the hard way, too: what has arrived is thrown away.
            linger = bytes([1, 0, 0, 0, 0, 0, 0, 0])
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)


def test_a_soak_of_short_requests(shared):
    """Eight threads, some of which hang up at random: answers are right and memory is flat."""
    texts = [" ".join(WORDS[: n + 1]) for n in range(len(WORDS))]
    expected = {text: library(shared, text) for text in texts}
    generator = shared.service.generator

    def client(seed, count):
        draw = random.Random(seed)
        for _ in range(count):
            text = draw.choice(texts)
            body = chat(text, max_tokens=8, draft=draw.random() < 0.8)
            kind = draw.random()
            if kind < 0.2:
                hang_up(shared, body | {"max_tokens": 300}, draw.choice([0.0, 0.02, 0.05]))
            elif kind < 0.5:
                assert text_of(shared.events(body)) == expected[text]
            else:
                answer = shared.ask(body)
                assert answer["choices"][0]["message"]["content"] == expected[text]

    def soak(count):
        with ThreadPoolExecutor(8) as pool:
            for result in [pool.submit(client, seed, count) for seed in range(8)]:
                result.result()

    soak(12)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    soak(51)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    deadline = time.monotonic() + 30
    while generator.jobs or shared.service.queue.inside:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert len(generator.store.lru) <= 4 and threading.active_count() < 40
    # In kilobytes: what a few more answers at once may need, and no trend.
    assert after - before < 60_000


@pytest.fixture(scope="module")
def embedded_pair():
    """A server without a word about models."""
    embedded_target()
    with Served(None) as server:
        yield server


def test_the_embedded_pair(embedded_pair):
    """It answers at once, with drafts that are accepted, and the second turn reads what is new."""
    question = {"role": "user", "content": "What is the capital of France?"}
    body = {"messages": [question], "max_tokens": 7, "num_draft_tokens": 3}
    answer = embedded_pair.ask(body)
    assert "Paris" in answer["choices"][0]["message"]["content"]
    first = answer["timings"]
    assert first["draft_n_accepted"] > 0 and first["prompt_n"] > 30
    turn = [question, answer["choices"][0]["message"], {"role": "user", "content": "And of Italy?"}]
    second = embedded_pair.ask(body | {"messages": turn})
    said = first["prompt_n"] + first["predicted_n"]
    # All but the last token that was said, and what the template puts after it.
    assert second["timings"]["cache_n"] >= said - 2
    plain = embedded_pair.ask(body | {"messages": turn, "draft": False})
    assert plain["choices"] == second["choices"] and plain["timings"]["draft_n"] == 0
