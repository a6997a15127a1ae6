"""Clients that hang up, do not read, or send nonsense; drafters and devices that fail."""

import json
import logging
import socket
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.proposers import half
from support.serving import chat, raw_request
from support.tiny import VOCAB, plain_tokens

from mlx_dflash2.decode.loop import Loop
from mlx_dflash2.server import connection, handler
from mlx_dflash2.server.http import Server

ROUTE = "/v1/chat/completions"
ENDLESS = {"511": -100, "509": -100}


def endless(text, **options):
    """A chat whose answer never ends by itself."""
    return chat(text, max_tokens=3000, logit_bias=ENDLESS) | options


@pytest.fixture
def rounds(monkeypatch):
    """Rounds that have been run; each takes a moment."""
    counted, run = [], Loop.next_round

    def next_round(self, *args):
        counted.append(time.monotonic())
        time.sleep(0.03)
        return run(self, *args)

    monkeypatch.setattr(Loop, "next_round", next_round)
    return counted


def wait_until(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def idle(server):
    return not server.service.generator.jobs and server.service.queue.inside == 0


def longest_entry(server):
    lru = server.service.generator.store.lru
    return max((len(tokens) for _, tokens in lru._lru._lrus["assistant"]), default=0)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_ends_its_generation(stream, serve, rounds):
    """Within one round; what it has read and said stays in the cache."""
    server = serve()
    with server.connect() as client:
        client.sendall(raw_request(endless("some words", stream=stream)))
        wait_until(lambda: len(rounds) > 5)
        if stream:
            assert b"text/event-stream" in client.recv(10_000)
    # The round that runs at this moment, and no other.
    at = len(rounds)
    wait_until(lambda: not server.service.generator.jobs)
    assert len(rounds) <= at + 1
    wait_until(lambda: idle(server))
    said = longest_entry(server)
    again = server.ask(chat("some words", max_tokens=2))
    assert again["timings"]["prompt_n"] == 1 and said > again["usage"]["prompt_tokens"]
    assert "mlx_dflash2_hangups_total 1.0" in server.request("/metrics")[2]


def test_a_client_that_hangs_up_in_its_prompt(serve, monkeypatch):
    """Between two chunks of the prompt, of which the first ones stay in the cache."""
    server = serve("--prefill-step-size", 16)
    chunks, read = [], Loop.read

    def slowly(self, sequence, chunk):
        chunks.append(chunk.size)
        time.sleep(0.03)
        return read(self, sequence, chunk)

    monkeypatch.setattr(Loop, "read", slowly)
    text = "a long prompt " * 100
    with server.connect() as client:
        client.sendall(raw_request(chat(text)))
        wait_until(lambda: len(chunks) > 4)
    at = len(chunks)
    wait_until(lambda: idle(server))
    assert len(chunks) <= at + 1
    answer = server.ask(chat(text, max_tokens=1))
    assert answer["timings"]["cache_n"] >= 16 * (at - 1)


def test_a_client_that_hangs_up_while_it_waits(serve, rounds):
    """It never gets a place, and the one that has it is not disturbed."""
    server = serve("--decode-concurrency", 1)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(server.ask, endless("first", max_tokens=60))
        wait_until(lambda: len(rounds) > 2)
        with server.connect() as client:
            client.sendall(raw_request(endless("second")))
            wait_until(lambda: len(server.service.generator.jobs) == 2)
        wait_until(lambda: len(server.service.generator.jobs) == 1)
        assert first.result()["usage"]["completion_tokens"] == 60
    wait_until(lambda: idle(server))


def test_a_slow_reader_stalls_nobody(serve):
    """Its answer waits in its own connection while others are answered."""
    server = serve()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.connect(("127.0.0.1", server.port))
        body = endless("much to read", stream=True, logprobs=True, top_logprobs=20)
        client.sendall(raw_request(body | {"max_tokens": 2500}))
        wait_until(lambda: server.service.generator.jobs)
        start = time.monotonic()
        for i in range(5):
            assert server.ask(chat(f"quick {i}", max_tokens=4))["usage"]["completion_tokens"] == 4
        assert time.monotonic() - start < 20
        # It is generated to its end although nobody has read it.
        wait_until(lambda: not server.service.generator.jobs, 120)
        assert server.service.queue.inside == 1
    wait_until(lambda: idle(server))


def test_a_reader_that_never_reads_is_given_up(serve, monkeypatch):
    monkeypatch.setattr(handler.Handler, "timeout", 0.5)
    server = serve()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.connect(("127.0.0.1", server.port))
        body = endless("much to read", stream=True, logprobs=True, top_logprobs=20)
        client.sendall(raw_request(body))
        wait_until(lambda: server.service.generator.jobs)
        wait_until(lambda: idle(server), 120)


def exchange(server, data):
    """What comes back for some bytes."""
    with server.connect() as client:
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)
        answer = b""
        while part := client.recv(65536):
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    status = int(head.split()[1])
    return status, json.loads(body)["error"] if body else None


NONSENSE = {
    "no JSON": (raw_request(b"{nonsense"), 400),
    "half of an object": (raw_request(b'{"messages": ['), 400),
    "nothing": (raw_request(b""), 400),
    "an array": (raw_request(b"[1, 2]"), 400),
    "not UTF-8": (raw_request(b'{"prompt": "\xff\xfe"}'), 400),
    "half a surrogate": (
        raw_request(b'{"messages": [{"role": "user", "content": "\\ud800"}]}'),
        400,
    ),
    "not a number": (raw_request(b'{"messages": [], "temperature": NaN}'), 400),
    "deep": (raw_request(b"[" * 200_000), 400),
    "a long number": (raw_request(b'{"max_tokens": ' + b"9" * 10_000 + b"}"), 400),
    "no length": (b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n\r\n", 411),
    "chunks": (raw_request(b"0\r\n\r\n", headers=[("Transfer-Encoding", "chunked")]), 411),
    "a negative length": (raw_request(b"{}", length=-1), 400),
    "a length that is none": (raw_request(b"{}", length="many"), 400),
    "too short": (raw_request(b"{}", length=100), 400),
    "a gigabyte announced": (raw_request(b"{}", length=10**9), 413),
    "far more": (raw_request(b"{}", length="9" * 40), 413),
    "another model": (raw_request(chat("hello", model="gpt-9")), 404),
    "another route": (raw_request({}, "/v1/embeddings"), 404),
    "a route of GET": (raw_request({}, "/v1/models"), 405),
    "no HTTP": (b"nonsense\r\n\r\n", 400),
    "an unknown method": (b"BREW /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n", 501),
    "a long path": (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", 414),
    "many headers": (
        b"GET /health HTTP/1.1\r\n" + b"".join(b"X-%d: 1\r\n" % i for i in range(200)) + b"\r\n",
        431,
    ),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense(name, served):
    """Each gets its status in OpenAI's form, and the server goes on."""
    data, expected = NONSENSE[name]
    status, error = exchange(served, data)
    assert status == expected, error
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"] and len(error["message"]) < 300
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    assert served.request("/health")[0] == 200


def test_a_wrong_method_names_the_right_one(served):
    status, headers, _ = served.request(ROUTE)
    assert status == 405 and headers["Allow"] == "POST"


def test_a_large_upload_does_not_take_memory(served):
    """What is refused is not kept, and its sender sees why although it sent it all."""
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    size, part = 300 * 2**20, bytes(2**20)
    with served.connect() as client:
        client.sendall(raw_request(b"", length=size))
        for _ in range(size // len(part)):
            client.sendall(part)
        answer = client.recv(65536)
    assert b" 413 " in answer.split(b"\r\n")[0]
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # In kilobytes on Linux: far less than was sent.
    assert (after - before) * 1024 < size / 4


def test_a_body_that_does_not_come(serve, monkeypatch):
    """A client that stops in mid-body is cut off; so is one that sends a byte at a time."""
    monkeypatch.setattr(handler.Handler, "timeout", 0.3)
    monkeypatch.setattr(connection, "BODY_SECONDS", 0.5)
    server = serve()
    with server.connect() as client:
        client.sendall(raw_request(b'{"mess', length=100))
        start = time.monotonic()
        assert client.recv(100) == b"" and time.monotonic() - start < 10
    with server.connect() as client:
        client.sendall(raw_request(b"{", length=100))
        for _ in range(8):
            client.sendall(b" ")
            time.sleep(0.1)
        assert b" 408 " in client.recv(1000)
    wait_until(lambda: idle(server))


def failing_drafter(pair, text, count, at):
    """A proposer that is right for two drafts and raises at one of its calls; the plain answer."""
    prompt = pair.tokenizer.encode(text)
    plain = plain_tokens(pair.model, prompt, count)
    proposer = half(prompt + plain, VOCAB, 2, block_size=4)
    propose = proposer.propose

    def failing(*args, **kwargs):
        if proposer.calls == at:
            proposer.calls += 1
            raise RuntimeError("the drafter is broken")
        return propose(*args, **kwargs)

    proposer.propose = failing
    return proposer, pair.tokenizer.decode(plain)


def test_a_drafter_that_fails(serve, saved_pair):
    """The answer goes on without it and says so; the next request has drafts again."""
    drafter, plain = failing_drafter(saved_pair, "some words", 30, at=3)
    server = serve("--verify-width", 4, drafter=drafter)
    body = {"prompt": "some words", "max_tokens": 30}
    with pytest.warns(UserWarning, match="without drafts"):
        answer = server.ask(body, "/v1/completions")
    timings = answer["timings"]
    assert "the drafter is broken" in timings["draft_stopped"]
    assert answer["choices"][0]["text"] == plain
    assert 0 < timings["draft_n_accepted"] < timings["draft_n"]
    again = server.ask(body, "/v1/completions")
    assert "draft_stopped" not in again["timings"]
    assert again["choices"] == answer["choices"]
    assert again["timings"]["draft_n"] > timings["draft_n"]


def test_a_round_that_fails(serve, monkeypatch):
    """Those who take part get an error, the next ones an answer."""
    server, run = serve(), Loop.next_round
    failing = threading.Event()
    failing.set()

    def next_round(self, *args):
        if failing.is_set():
            raise RuntimeError("out of memory")
        return run(self, *args)

    monkeypatch.setattr(Loop, "next_round", next_round)
    status, error = server.refusal(chat("hello", max_tokens=5))
    assert status == 500 and error["type"] == "server_error"
    assert "out of memory" in error["message"]
    status, _, text = server.request(ROUTE, chat("hello", max_tokens=5, stream=True))
    assert status == 200 and '"server_error"' in text and "[DONE]" not in text
    failing.clear()
    assert server.ask(chat("hello", max_tokens=5))["usage"]["completion_tokens"] == 5
    assert server.request("/health")[0] == 200
    wait_until(lambda: idle(server))


def test_a_thread_that_dies(serve, monkeypatch):
    """Nobody waits for ever, and the server says that it is not well."""
    server = serve()

    def next_round(self, *_):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Loop, "next_round", next_round)
    status, _ = server.refusal(chat("hello", max_tokens=5))
    assert status == 500
    assert server.request("/health")[0] == 503
    assert server.refusal(chat("hello", max_tokens=5))[0] in (500, 503)


def test_stopping_lets_those_inside_finish(serve, rounds):
    server = serve()
    with ThreadPoolExecutor() as pool:
        running = pool.submit(server.ask, endless("first", max_tokens=40))
        wait_until(lambda: len(rounds) > 2)
        stopping = pool.submit(server.service.stop, 30.0)
        server.closed = True
        wait_until(lambda: not server.service.queue.open)
        assert running.result()["usage"]["completion_tokens"] == 40
        assert stopping.result() is True
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{server.port}/health", timeout=5)


def test_stopping_does_not_wait_for_ever(serve, rounds):
    server = serve()
    with ThreadPoolExecutor() as pool:
        running = pool.submit(server.refusal, endless("first"))
        wait_until(lambda: len(rounds) > 2)
        start = time.monotonic()
        assert server.service.stop(0.3) is False
        assert time.monotonic() - start < 10
        server.closed = True
        status, error = running.result()
    assert status == 503 and "shutting down" in error["message"]


def test_too_many_requests(serve, rounds):
    """Two hundred at once: as many as fit are answered, the others are told to come back."""
    server = serve("--decode-concurrency", 4, "--max-queue", 30)
    body = json.dumps(chat("hello", max_tokens=6)).encode()

    def ask(_):
        status, headers, text = server.request(ROUTE, body)
        return status, headers, json.loads(text)

    with ThreadPoolExecutor(200) as pool:
        answers = list(pool.map(ask, range(200)))
    statuses = [status for status, *_ in answers]
    assert set(statuses) <= {200, 429, 503} and statuses.count(200) >= 34
    texts = {a["choices"][0]["message"]["content"] for s, _, a in answers if s == 200}
    assert len(texts) == 1
    for status, headers, answer in answers:
        if status != 200:
            assert int(headers["Retry-After"]) > 0 and answer["error"]["message"]
    assert 429 in statuses
    wait_until(lambda: idle(server))
    assert server.ask(chat("hello", max_tokens=2))["usage"]["completion_tokens"] == 2


def test_a_full_queue_is_a_matter_of_requests(serve, rounds):
    """Whoever only asks whether the server is well gets an answer."""
    server = serve("--decode-concurrency", 1, "--max-queue", 0)
    with ThreadPoolExecutor() as pool:
        running = pool.submit(server.ask, endless("first", max_tokens=40))
        wait_until(lambda: len(rounds) > 2)
        status, error = server.refusal(chat("second"))
        assert status == 429 and error["type"] == "rate_limit_error"
        assert error["code"] == "queue_full"
        assert server.request("/health")[0] == 200 and server.request("/v1/models")[0] == 200
        running.result()


def test_too_many_connections():
    """Silent connections do not use up threads without end."""
    inside, leave = threading.Semaphore(0), threading.Event()

    def hold(*_):
        inside.release()
        leave.wait(30)

    server = Server("127.0.0.1", 0, hold, max_connections=2)
    server.start()
    port = server.server_address[1]
    clients = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(3)]
    assert inside.acquire(timeout=30) and inside.acquire(timeout=30)
    answer = clients[2].recv(1000)
    assert b"503" in answer.split(b"\r\n")[0] and b"Retry-After" in answer
    leave.set()
    for client in clients:
        client.close()

    def gets_in():
        with socket.create_connection(("127.0.0.1", port), timeout=30):
            return inside.acquire(timeout=0.2)

    wait_until(gets_in)
    server.stop()


def test_nothing_secret_is_logged(serve, caplog):
    """No prompt, no answer, no key: not even of requests that are refused."""
    server = serve("--api-key", "hush-key")
    key = {"Authorization": "Bearer hush-key"}
    caplog.set_level(logging.INFO)
    body = chat("hush-prompt", max_tokens=4)
    answer = server.ask(body, headers=key)
    said = answer["choices"][0]["message"]["content"]
    server.request(ROUTE, body | {"stream": True}, key)
    server.request(ROUTE, body, {"Authorization": "Bearer hush-wrong"})
    server.request(ROUTE + "?key=hush-query", body, key)
    server.request(ROUTE, body | {"temperature": "hush-field"}, key)
    server.request(ROUTE, chat("forbidden hush"), key)
    exchange(server, b"hush nonsense\r\n\r\n")
    exchange(server, raw_request(b'{"hush": nonsense', headers=key.items()))
    text = caplog.text
    assert "hush" not in text and len(said) > 3 and said not in text
    assert "POST '/v1/chat/completions' 200" in text and "401" in text
    caplog.clear()
    caplog.set_level(logging.DEBUG)
    server.ask(body, headers=key)
    assert "hush-prompt" in caplog.text and "hush-key" not in caplog.text
