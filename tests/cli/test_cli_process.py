"""The command as a process: how it is called, and how it ends when it is cut short."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import mlx_lm
import pytest

BIN = Path(sys.executable).parent
SPELLINGS = {
    "module": [sys.executable, "-W", "error::RuntimeWarning", "-m", "mlx_dflash2.generate"],
    "script": [BIN / "mlx_dflash2.generate"],
    "dispatcher": [BIN / "mlx_dflash2", "generate"],
}


@pytest.fixture
def start(model_folders):
    processes = []

    def start(spelling, *args):
        target, drafter = model_folders / "target", model_folders / "drafter"
        root = str(Path(__file__).parents[2])
        process = subprocess.Popen(
            [*SPELLINGS[spelling], "--model", target, "--draft-model", drafter, *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": root, "PYTHONWARNINGS": "default::RuntimeWarning"},
            # A runner in the background may have made its children ignore Ctrl-C.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_all_spellings_print_the_text(start, saved_pair, spelling):
    model, tokenizer = saved_pair.model, saved_pair.tokenizer
    prompt = tokenizer.encode("A line.\n")
    expected = mlx_lm.generate(model, tokenizer, prompt, max_tokens=9)
    process = start(spelling, "--ignore-chat-template", "-p", "-", "-m", "9")
    out, err = process.communicate(b"A line.\n", timeout=60)
    assert process.returncode == 0, err
    assert out.decode() == expected + "\n"
    assert b"Generation: 9 tokens" in err
    assert b"RuntimeWarning" not in err


def unexpected(err):
    """What stderr holds beside the one word about a machine without Metal."""
    lines = err.decode().splitlines()
    return [line for line in lines if line and not line.startswith("warning: The plain MLX forms")]


def start_endless(start):
    process = start("module", "-p", "hello", "-m", "-1")
    process.stdin.close()
    process.stdin = None
    assert process.stdout.read(1), process.stderr.read()
    return process


def test_interrupt_ends_cleanly(start):
    process = start_endless(start)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert not unexpected(err)


def test_broken_pipe_ends_cleanly(start):
    process = start_endless(start)
    process.stdout.close()
    assert process.wait(timeout=30) == 141
    assert not unexpected(process.stderr.read())


def test_error_of_a_process(start):
    process = start("module", "--block-size", "99")
    out, err = process.communicate(timeout=30)
    assert process.returncode == 1 and not out
    assert err.decode().startswith("error: --block-size is 99") and err.count(b"\n") == 1
