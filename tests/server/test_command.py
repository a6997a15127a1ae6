"""Every flag of mlx_lm.server works here as there, or is refused by name."""

import argparse
import importlib
import logging
import re
import signal
import subprocess
import sys

import pytest
from support.commands import main_of
from support.serving import chat

from mlx_dflash2.server.http import Server
from mlx_dflash2.server.options import prepare_arguments, setup_arg_parser, size

theirs = importlib.import_module("mlx_lm.server")

# Defaults that are not mlx-lm's, and why.
OTHER_DEFAULTS = {
    "--allowed-origins": "any web page could drive the server",
    "--num-draft-tokens": "the controller chooses the width",
    "--prefill-step-size": "the device decides",
}
# Flags that mlx_lm.server does not have.
OWN = {"--draft-bits", "--block-size", "--verify-width", "--allowed-hosts", "--api-key"}
OWN |= {
    "--revision",
    "--no-kernels",
    "--copy-drafts",
    "--draft-vocab",
    "--version",
    "--quantize-activations",
}
OWN |= {"--extra-eos-token", "--dense", "--no-fast-blas"}
OWN |= {"--max-queue", "--prompt-cache-dir", "--prompt-cache-dir-bytes"}
UNSUPPORTED = {"--pipeline"}


@pytest.fixture
def their_flags(monkeypatch):
    """The actions of mlx_lm.server's parser, which its main makes and keeps to itself."""
    seen = []

    def parse_args(self, *_):
        seen.append(self)
        raise SystemExit

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    with pytest.raises(SystemExit):
        theirs.main()
    return actions_of(seen[0])


def actions_of(parser):
    return {a.option_strings[0]: a for a in parser._actions if "--help" not in a.option_strings}


def test_flags_are_those_of_mlx_lm_and_some_more(their_flags):
    flags = actions_of(setup_arg_parser())
    assert set(flags) == set(their_flags) | OWN
    for name, action in their_flags.items():
        ours = flags[name]
        assert ours.dest == action.dest and list(ours.choices or ()) == list(action.choices or ())
        if name in UNSUPPORTED:
            continue
        assert type(ours) is type(action), name
        if name not in OTHER_DEFAULTS:
            assert ours.default == action.default, name
        assert ours.help


@pytest.mark.parametrize("text", ["123", "1.5GB", "20M", "3 G", "7MB"])
def test_sizes_mean_what_they_mean_there(text):
    assert size(text) == importlib.import_module("mlx_lm.utils")._parse_size(text)


@pytest.mark.parametrize("text", ["", "x", "-1", "4X", "nan", "1e30", "GB"])
def test_sizes_that_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError):
        size(text)


@pytest.mark.parametrize(
    "words, message",
    [
        (["--pipeline"], "--pipeline is not supported: distributed decoding does not draft"),
        (["--max-queue", "-1"], "--max-queue is -1 but has to be 0 or more"),
        (["--decode-concurrency", "0"], "--decode-concurrency is 0 but has to be 1 or more"),
        (["--prompt-concurrency", "0"], "--prompt-concurrency is 0 but has to be 1 or more"),
        (["--prefill-step-size", "0"], "--prefill-step-size is 0 but has to be 1 or more"),
        (["--num-draft-tokens", "2", "--verify-width", "3"], "say the same; give one of them"),
        (["--num-draft-tokens", "-1"], "--num-draft-tokens is -1 but has to be 0 or more"),
        (["--num-draft-tokens", "16"], "--verify-width is 17 but has to be"),
        (["--top-k", "512"], "--top-k is 512 but has to be below 512"),
        (["--temp", "-1"], "--temp is -1.0 but has to be from 0.0 to inf"),
        (["--chat-template-args", "[]"], "--chat-template-args has to be a JSON object"),
        (["--api-key", " "], "--api-key is empty"),
        (["--kv-bits", "7"], "--kv-bits is 7"),
        (["--prompt-cache-bytes", "lots"], "lots is not a size"),
        (["--port", "65536"], "--port is 65536 but has to be 0 or more and below 65536"),
    ],
)
def test_what_is_refused(words, message, invoke, model_folders):
    """One line, and the command does not start."""
    models = ["--model", str(model_folders / "target")]
    models += ["--draft-model", str(model_folders / "drafter")]
    status, out, err = invoke(*models, *words, main=main_of("server"))
    assert status != 0 and out == ""
    assert message in err.splitlines()[-1]


def test_flags_reach_the_requests(serve):
    server = serve("--max-tokens", 3, "--top-k", 1, "--temp", 5, "--num-draft-tokens", 2)
    answer = server.ask(chat("hello"))
    assert answer["usage"]["completion_tokens"] == 3
    # Top-k of one token leaves nothing to chance.
    assert answer["choices"] == server.ask(chat("hello", temperature=0))["choices"]
    longer = server.ask(chat("hello", max_tokens=9))
    assert longer["usage"]["completion_tokens"] == 9
    timings = longer["timings"]
    assert 0 < timings["draft_n"] <= 2 * timings["rounds"]
    plain = server.ask(chat("hello", num_draft_tokens=0))
    assert plain["timings"]["draft_n"] == 0


def test_flags_reach_the_template(serve):
    server = serve("--chat-template-args", '{"effort": "low"}', "--max-tokens", 1)
    plain = serve("--max-tokens", 1)

    def size(server, **options):
        return server.ask(chat("hello", **options))["usage"]["prompt_tokens"]

    assert size(server) == size(plain) + len("[low]")
    # A request's own arguments go before them.
    assert size(server, chat_template_kwargs={"effort": "none at all"}) > size(server)
    assert size(plain, chat_template_kwargs={"effort": "low"}) == size(server)


def test_caches_can_be_quantized(serve):
    server = serve("--kv-bits", 8, "--kv-group-size", 32, "--quantized-kv-start", 0)
    answer = server.ask(chat("hello", max_tokens=8))
    assert answer["usage"]["completion_tokens"] == 8
    assert "quantized" in server.provider.one_at_a_time


def test_no_address_but_this_machine_unless_told():
    args = setup_arg_parser().parse_args([])
    prepare_arguments(args)
    assert args.host == "127.0.0.1"
    server = Server(args.host, 0, object, 1)
    assert server.url == f"http://127.0.0.1:{server.server_address[1]}/v1"
    server.server_close()


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_the_process(ending, model_folders, tmp_path):
    """It says where it is, answers, and ends by a signal without an error."""
    models = ["--model", str(model_folders / "target")]
    models += ["--draft-model", str(model_folders / "drafter")]
    log = (tmp_path / "log").open("w+")
    process = subprocess.Popen(
        [sys.executable, "-m", "mlx_dflash2", "server", *models, "--port", "0"], stderr=log
    )
    try:
        line = wait_for_line(log, process, " at http")
        assert re.fullmatch(r"target with the drafter drafter at http://127\.0\.0\.1:\d+/v1", line)
        url = line.split(" at ")[1]
        words = ["curl", "-s", f"{url}/chat/completions", "-H", "Content-Type: application/json"]
        body = '{"messages": [{"role": "user", "content": "secret words"}], "max_tokens": 4}'
        answer = subprocess.run([*words, "-d", body], capture_output=True, timeout=60, check=True)
        assert b'"completion_tokens": 4' in answer.stdout
        process.send_signal(ending)
        assert process.wait(60) == 0
    finally:
        process.kill()
    log.seek(0)
    text = log.read()
    assert "drafts were accepted: `usage`, `timings`, /metrics" in text
    assert "Stopping" in text and "Traceback" not in text and "secret" not in text
    assert "'/v1/chat/completions' 200" in text
    log.close()


def wait_for_line(log, process, words):
    """The line of a log that holds some words."""
    for _ in range(600):
        log.seek(0)
        for line in log.read().splitlines():
            if words in line:
                return line
        try:
            process.wait(0.1)
            break
        except subprocess.TimeoutExpired:
            continue
    log.seek(0)
    raise AssertionError(log.read())


def test_logging_is_left_to_the_command(served):
    """A server that is started from Python does not set up logging."""
    before = logging.getLogger().handlers[:]
    served.ask(chat("hello", max_tokens=1))
    assert logging.getLogger().handlers == before
