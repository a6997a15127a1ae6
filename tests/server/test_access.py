"""Who is let in: keys, hosts and origins, each refused in OpenAI's form."""

import socket
from email.message import Message

import pytest
from support.serving import chat

from mlx_dflash2.server.access import Access, host_name
from mlx_dflash2.server.errors import ApiError

BODY = chat("hello", max_tokens=1)
KEY = "s3cret-ключ"


def headers(**fields):
    message = Message()
    for name, value in fields.items():
        message[name] = value
    return message


@pytest.fixture(scope="module")
def locked(model_folders):
    from support.serving import Served

    with Served(model_folders, "--api-key", "s3cret") as server:
        yield server


@pytest.mark.parametrize(
    "given", [None, "", "s3cret", "Bearer", "Bearer ", "Bearer wrong", "Basic s3cret", "Bearer é"]
)
def test_a_key_that_is_missing_or_wrong(given, locked):
    fields = {} if given is None else {"Authorization": given.encode("utf-8").decode("latin-1")}
    for path, body in (("/v1/chat/completions", BODY), ("/v1/models", None)):
        status, sent, text = locked.request(path, body, fields)
        assert status == 401 and sent["WWW-Authenticate"] == "Bearer"
        assert '"invalid_api_key"' in text and "s3cret" not in text


def test_the_right_key(locked):
    for scheme in ("Bearer", "bearer"):
        answer = locked.ask(BODY, headers={"Authorization": f"{scheme} s3cret"})
        assert answer["usage"]["completion_tokens"] == 1
    assert locked.ask(None, "/health") == {"status": "ok"}


def test_keys_are_compared_in_constant_time(monkeypatch):
    import hmac

    seen = []
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: seen.append((a, b)) or a == b)
    access = Access("127.0.0.1", KEY)
    access.check(headers(Authorization=f"Bearer {KEY}"), needs_key=True)
    with pytest.raises(ApiError):
        access.check(headers(Authorization="Bearer s"), needs_key=True)
    assert seen == [(KEY.encode(), KEY.encode()), (b"s", KEY.encode())]


OWN = ["127.0.0.1", "localhost", "localhost:8080", "[::1]:8080", "LOCALHOST", "10.1.2.3:80"]
OWN += [socket.gethostname(), "localhost."]
FOREIGN = ["evil.example", "evil.example:8080", "localhost.evil.example", "127.0.0.1.evil.example"]


@pytest.mark.parametrize("host", [*OWN, *FOREIGN])
def test_hosts(host, served):
    """A name that somebody points at this machine is not its own; an address is."""
    status, _, text = served.request("/v1/chat/completions", BODY, {"Host": host})
    assert status == (200 if host in OWN else 403), text
    if status == 403:
        assert "not this server" in text and "permission_error" in text


def test_more_hosts(serve):
    server = serve("--allowed-hosts", "models.example, other.example")
    statuses = [
        server.request("/v1/models", headers={"Host": host})[0]
        for host in ("models.example:443", "OTHER.example", "third.example")
    ]
    assert statuses == [200, 200, 403]
    every = Access("0.0.0.0", allowed_hosts=["*"])
    every.check(headers(Host="anything.example"), needs_key=False)


def test_names_of_hosts():
    assert host_name("A.b:80") == "a.b" and host_name("[::1]:80") == "::1"
    assert host_name("a.b.") == "a.b" and host_name("[fe80::1]") == "fe80::1"


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost:3000"])
def test_no_web_page_is_let_in(origin, served):
    """Not even with a request that a browser sends without asking."""
    fields = {"Origin": origin, "Content-Type": "text/plain"}
    status, sent, _ = served.request("/v1/chat/completions", BODY, fields)
    assert status == 403 and sent["Access-Control-Allow-Origin"] is None
    status, sent, _ = served.request("/v1/chat/completions", headers=fields, method="OPTIONS")
    assert status == 403 and sent["Access-Control-Allow-Origin"] is None


def test_allowed_origins(serve):
    good, bad = {"Origin": "http://good.example"}, {"Origin": "http://bad.example"}
    server = serve("--allowed-origins", "http://good.example,http://two.example")
    status, sent, _ = server.request("/v1/chat/completions", BODY, good)
    assert status == 200 and sent["Access-Control-Allow-Origin"] == good["Origin"]
    assert "Origin" in sent["Vary"]
    status, sent, text = server.request("/v1/chat/completions", headers=good, method="OPTIONS")
    assert status == 204 and text == "" and "POST" in sent["Access-Control-Allow-Methods"]
    assert "Authorization" in sent["Access-Control-Allow-Headers"]
    assert server.request("/v1/chat/completions", BODY, bad)[0] == 403
    assert serve("--allowed-origins", "*").request("/v1/models", headers=bad)[0] == 200


def test_a_page_may_ask_without_the_key(serve):
    """A browser's question before the request carries no key; the request itself has to."""
    server = serve("--allowed-origins", "*", "--api-key", "k")
    origin = {"Origin": "http://a.example"}
    assert server.request("/v1/models", headers=origin, method="OPTIONS")[0] == 204
    assert server.request("/v1/models", headers=origin)[0] == 401
