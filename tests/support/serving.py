"""A server of a tiny pair on a free port, and a client that checks nothing for itself."""

import json
import socket
import urllib.error
import urllib.request
from contextlib import contextmanager

import mlx.core as mx

from mlx_dflash2.server.command import Service, check_arguments
from mlx_dflash2.server.options import setup_arg_parser
from mlx_dflash2.server.pair import PairProvider
from support.saved_models import CHAT_TEMPLATE, save_drafter, save_target
from support.tiny import DENSE, drafter_config

TIMEOUT = 60


class Served:
    """The service in this process, on a port that the system chooses.

    Without folders it is the embedded pair; ``drafter`` takes the place of the pair's own.
    """

    def __init__(self, folders, *args, drafter=None):
        models = []
        if folders is not None:
            models = ["--model", str(folders / "target")]
            models += ["--draft-model", str(folders / "drafter")]
        self.args = setup_arg_parser().parse_args([*models, "--port", "0", *map(str, args)])
        check_arguments(self.args)
        self.provider = PairProvider(self.args)
        self.provider.load_default()
        if drafter is not None:
            self.provider.draft_model = drafter
        self.service = Service(self.args, self.provider)
        self.port = self.service.http.server_address[1]
        self.closed = False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self, seconds=5.0):
        if not self.closed:
            self.closed = True
            self.service.stop(seconds)

    @property
    def url(self):
        return self.service.http.url

    def request(self, path, body=None, headers=(), method=None):
        """Status, headers and text of an answer."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | dict(headers)
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, headers, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
                return answer.status, answer.headers, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.headers, error.read().decode()

    def ask(self, body, path="/v1/chat/completions", **kwargs):
        """The decoded body of an answer that has to be fine."""
        status, _, text = self.request(path, body, **kwargs)
        assert status == 200, text
        return json.loads(text)

    def refusal(self, body, path="/v1/chat/completions", **kwargs):
        """Status and error of an answer that has to be one."""
        status, _, text = self.request(path, body, **kwargs)
        error = json.loads(text)["error"]
        assert set(error) == {"message", "type", "param", "code"} and "\n" not in error["message"]
        return status, error

    def events(self, body, path="/v1/chat/completions"):
        """The chunks of a stream, which has to end as it should."""
        status, headers, text = self.request(path, body | {"stream": True})
        assert status == 200 and headers["Content-Type"] == "text/event-stream", text
        events = [line[6:] for line in text.split("\n\n") if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        return [json.loads(event) for event in events[:-1]]

    @contextmanager
    def connect(self):
        """A connection without a client library."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=TIMEOUT) as connection:
            yield connection


def chat(text, **options):
    """The body of a chat with one message."""
    return {"messages": [{"role": "user", "content": text}]} | options


def raw_request(body, path="/v1/chat/completions", length=None, headers=()):
    """The bytes of a POST."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    size = len(data) if length is None else length
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {size}"]
    lines += [f"{name}: {value}" for name, value in headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


def text_of(chunks):
    """The text that the chunks of a chat's stream add up to."""
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


def joined(chunks):
    """The message that chunks add up to."""
    message = {"role": "assistant", "content": None}
    for chunk in chunks:
        for name, part in chunk["choices"][0]["delta"].items():
            if name == "tool_calls":
                for call in part:
                    calls = message.setdefault(name, [])
                    assert call.pop("index") == len(calls)
                    calls.append(call)
            elif name != "role" and part:
                message[name] = (message.get(name) or "") + part
    return message


# The last one is the tokenizer's of a hybrid target, which would add it.
THINKING = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|endoftext|>")
# mlx-lm finds the parser of tool calls by these words.
TOOL_TEMPLATE = CHAT_TEMPLATE + "{# <tool_call> tool_call.name #}"


def save_thinking_pair(folder, kind=DENSE):
    """A pair whose tokenizer has tokens of thoughts and tool calls."""
    save_target(folder / "target", kind, TOOL_TEMPLATE, THINKING)
    save_drafter(folder / "drafter", drafter_config(block_size=4))
    return folder


class Script:
    """A logits processor under which an answer is a given text, and then its end."""

    def __init__(self, tokenizer, text):
        self.tokens = [*tokenizer.encode(text, add_special_tokens=False), 511]
        self.start = None

    def __call__(self, tokens, logits):
        if self.start is None:
            self.start = tokens.size
        place = min(tokens.size - self.start, len(self.tokens) - 1)
        mask = mx.arange(logits.shape[-1]) == self.tokens[place]
        return mx.where(mask, logits, -mx.inf)
