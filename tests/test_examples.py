"""The examples run as they are and print what their text says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.saved_models import embedded_target
from support.serving import Served

EXAMPLES = Path(__file__).parents[1] / "examples"
EXPECTED = {
    "generate_response": ["The capital of France is Paris.", "drafts accepted in"],
    "stream": ["[", "12 tokens, length"],
    "chat_turns": [
        "> What is the capital of France?\nThe capital of France is Paris.",
        "(37 prompt tokens processed, 0 from the cache)",
        # The first prompt, and an answer of eight tokens.
        "> And of Italy?\nThe capital of Italy is Rome.",
        "(14 prompt tokens processed, 45 from the cache)",
    ],
    "batch": ["Paris.", "Tokyo.", "tokens in"],
    "mac_pair": ["Generation: ", "Drafting: "],
    "own_drafter": ["row, row, row, row, row, row,", "5 of 5 drafts accepted in 6 rounds"],
}


@pytest.fixture(scope="module")
def running(model_folders):
    """All examples, started at once: each keeps one core busy."""
    embedded_target()
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parent)}
    # Nobody has the pair of that example here.
    pair = dict.fromkeys(EXPECTED, ())
    pair["mac_pair"] = model_folders / "target", model_folders / "drafter"
    processes = {
        name: subprocess.Popen(
            [sys.executable, "-W", "error::UserWarning", EXAMPLES / f"{name}.py", *pair[name]],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in EXPECTED
    }
    yield processes
    for process in processes.values():
        process.kill()
        process.communicate()


def test_every_example_is_run():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*EXPECTED, "server_client"}


@pytest.mark.parametrize("name", [*EXPECTED, "server_client"])
def test_examples_are_short(name):
    text = (EXAMPLES / f"{name}.py").read_text()
    assert len(text.splitlines()) <= 40 and "argparse" not in text


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", EXPECTED)
def test_example(running, name):
    out, err = running[name].communicate(timeout=240)
    assert running[name].returncode == 0, err
    at = 0
    for expected in EXPECTED[name]:
        assert expected in out[at:], out
        at = out.index(expected, at) + len(expected)


def test_a_client_of_the_server(model_folders):
    with Served(model_folders) as server:
        done = subprocess.run(
            [sys.executable, EXAMPLES / "server_client.py", server.url],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 0, done.stderr
    assert "drafts accepted, " in done.stdout.splitlines()[-1]
