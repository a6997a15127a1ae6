"""The chat command as a process: Ctrl-C in mid-answer, and nothing to read."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mlx_dflash2.chat.settings import HELP


@pytest.fixture
def start(model_folders):
    processes = []

    def start(*args, spelling=("-m", "mlx_dflash2.chat"), **options):
        models = ("--model", model_folders / "target", "--draft-model", model_folders / "drafter")
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        process = subprocess.Popen(
            [sys.executable, "-W", "error::RuntimeWarning", *spelling, *models, *args],
            **pipes | options,
            bufsize=0,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
            # A runner in the background may have made its children ignore Ctrl-C.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_sigint_in_mid_answer(start):
    process = start("-m", "-1")
    watchdog = threading.Timer(60, process.kill)
    watchdog.daemon = True
    watchdog.start()
    for message in (b"Hello\n", b"Why?\n"):
        process.stdin.write(message)
        process.stdin.flush()
        assert process.stdout.read(20)
        process.send_signal(signal.SIGINT)
        # Up to the line about the answer; it would never end by itself.
        while not process.stderr.readline().startswith(b"["):
            assert process.poll() is None
        # All of the answer is out by then, and must not be taken for the next one.
        os.set_blocking(process.stdout.fileno(), False)
        shown = process.stdout.read()
        os.set_blocking(process.stdout.fileno(), True)
        assert shown.endswith(b"\n")
    out, err = process.communicate(timeout=30)
    watchdog.cancel()
    assert process.returncode == 0 and not err.strip() and not out


@pytest.mark.parametrize(
    "spelling",
    [("-m", "mlx_dflash2.chat"), ("-c", "import mlx_dflash2.__main__ as c; c.main()", "chat")],
    ids=["module", "dispatcher"],
)
def test_nothing_to_read(start, spelling):
    process = start(spelling=spelling, stdin=subprocess.DEVNULL)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert not out and b"Traceback" not in err and HELP.encode() in err
