"""Commands in pseudo-terminals and with closed streams: what a person sees, and Ctrl-C."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pexpect
import pytest

COMMANDS = (
    "generate", "chat", "demo", "benchmark", "doctor", "convert", "train", "download", "omlx",
    "cache_prompt",
)  # fmt: skip
WIDTHS = (80, 40)


@pytest.fixture
def terminal(model_folders):
    """Starts a command in a pseudo-terminal; with models, on the tiny pair."""
    children = []
    # The size of the terminal counts, not what a runner says about its own.
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}

    def start(name, *args, width=80, models=True):
        argv = ["-m", f"mlx_dflash2.{name}", *map(str, args)]
        if models:
            argv += ["--model", f"{model_folders / 'target'}"]
            argv += ["--draft-model", f"{model_folders / 'drafter'}"]
        child = pexpect.spawn(
            sys.executable,
            argv,
            dimensions=(24, width),
            encoding="utf-8",
            timeout=60,
            env=environment | {"NO_COLOR": "1", "TERM": "dumb"},
        )
        children.append(child)
        return child

    yield start
    for child in children:
        child.close(force=True)


def read_all(child):
    """What a command printed up to its end, and its exit status."""
    child.expect(pexpect.EOF)
    child.close()
    return child.before.replace("\r\n", "\n"), child.exitstatus


@pytest.mark.parametrize("width", WIDTHS)
def test_an_answer_is_in_one_piece(terminal, width):
    out, status = read_all(terminal("generate", "-m", "30", width=width))
    assert status == 0 and "warning" not in out and "metal_kernel" not in out
    answer, summary = out.split("\nPrompt: ")
    assert answer and "Generation: 30 tokens" in summary
    # The kernels' forms are told once.
    assert summary.count("Metal") <= 1


def test_a_warning_waits_for_the_end_of_the_answer(terminal):
    args = ("-m", "40", "--max-kv-size", "8")
    out, status = read_all(terminal("generate", *args))
    assert status == 0
    before, _, after = out.partition("\nwarning: ")
    if after:
        assert "\n" in after and "Prompt: " not in before


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_the_terminal(terminal, name):
    out, status = read_all(terminal(name, "--help", models=False))
    assert status == 0 and max(map(len, out.splitlines())) <= 80
    assert f"usage: mlx_dflash2.{name}" in out


@pytest.mark.parametrize("name", COMMANDS)
def test_help_needs_no_mlx(name):
    code = (
        "import sys, runpy\n"
        f"sys.argv = ['x', '--help']\n"
        f"try: runpy.run_module('mlx_dflash2.{name}', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "print([m for m in ('mlx.core', 'mlx_lm', 'transformers', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.endswith("[]\n"), done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_knows_its_version(terminal, name):
    out, status = read_all(terminal(name, "--version", models=False))
    assert status == 0 and out.strip().count(".") == 2


@pytest.mark.parametrize("name", COMMANDS)
def test_a_wrong_use_takes_two_lines(terminal, name):
    out, status = read_all(terminal(name, "--no-such-flag", models=False))
    assert status == 2
    usage, error = out.strip().splitlines()[0], out.strip().splitlines()[-1]
    assert usage.startswith("usage: ") and error.startswith("error: ")
    assert len(out.strip().splitlines()) == 2


@pytest.mark.parametrize("module", ["mlx_dflash2.cli.start", "tqdm", "mlx.core", "mlx_lm"])
@pytest.mark.parametrize("name", ["generate", "chat"])
def test_ctrl_c_while_modules_are_imported_takes_one_line(name, module):
    code = (
        "import runpy, sys\n"
        "class Press:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == {module!r}: raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Press())\n"
        "sys.argv = ['x']\n"
        f"runpy.run_module('mlx_dflash2.{name}', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 130 and len(done.stderr.splitlines()) <= 1, done.stderr


def test_ctrl_c_in_an_answer(terminal):
    child = terminal("generate", "-m", "-1")
    child.expect("[a-z]{20}")
    child.sendintr()
    out, status = read_all(child)
    assert status == 130 and "Traceback" not in out


def test_a_chat_edits_lines_and_remembers_them(terminal):
    child = terminal("chat", "-m", "3")
    child.expect("model")
    child.expect("›")
    # "Helo", a step to the left, "l".
    child.send("Helo\x1b[Dl\r")
    child.expect("tokens a round")
    child.expect("›")
    # The line above, again.
    child.send("\x1b[A\r")
    child.expect("Hello")
    child.expect("tokens a round")
    child.sendline("/drafts off")
    child.expect("drafts off")
    child.sendline("q")
    out, status = read_all(child)
    assert status == 0 and "^[" not in out


@pytest.mark.parametrize("stream", ["stdin", "stdout", "stderr"])
def test_a_closed_stream_is_quiet(model_folders, stream):
    number = {"stdin": 0, "stdout": 1, "stderr": 2}[stream]
    argv = [sys.executable, "-m", "mlx_dflash2.chat" if stream == "stdin" else
            "mlx_dflash2.generate", "-m", "4", "--model", str(model_folders / "target"),
            "--draft-model", str(model_folders / "drafter")]  # fmt: skip
    done = subprocess.run(
        argv, capture_output=True, text=True, preexec_fn=lambda: os.close(number), timeout=60
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert "NoneType" not in done.stderr


def test_a_pipe_gets_no_bar(model_folders):
    argv = [sys.executable, "-m", "mlx_dflash2.generate", "-m", "4", "--prompt", "long " * 400,
            "--prefill-step-size", "16", "--model", str(model_folders / "target"),
            "--draft-model", str(model_folders / "drafter")]  # fmt: skip
    done = subprocess.run(argv, capture_output=True, timeout=60)
    assert done.returncode == 0 and b"\r" not in done.stderr + done.stdout


def test_without_a_backend_of_mlx_one_line_says_what_to_install(tmp_path):
    (tmp_path / "mlx").mkdir()
    (tmp_path / "mlx" / "__init__.py").write_text("")
    (tmp_path / "mlx" / "core.py").write_text(
        "raise ImportError('libmlx.so: cannot open shared object file')"
    )
    done = subprocess.run(
        [sys.executable, "-m", "mlx_dflash2.generate"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{os.getcwd()}"},
        timeout=60,
    )
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "pip install 'mlx[cpu]'" in done.stderr


def test_sigterm_ends_a_command(terminal):
    child = terminal("generate", "-m", "-1")
    child.expect("[a-z]{20}")
    child.kill(signal.SIGTERM)
    child.expect(pexpect.EOF)
    child.close()
    assert child.signalstatus == signal.SIGTERM


def test_training_by_default_asks_first(terminal, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    child = terminal("train", models=False)
    child.expect(r"Begin\? \[y/N\]")
    assert "2000 prompts" in child.before and "folder drafter" in child.before
    child.sendline("")
    out, status = read_all(child)
    assert status == 0 and "Traceback" not in out and not list(tmp_path.iterdir())


def test_ctrl_c_in_a_prompt(terminal):
    child = terminal("generate", "--prompt", "word " * 4000, "--prefill-step-size", "1", "-m", "4")
    child.expect("Prompt: ")
    child.sendintr()
    out, status = read_all(child)
    assert status == 130 and "Traceback" not in out


@pytest.mark.parametrize("width", WIDTHS)
def test_ctrl_c_in_a_benchmark_shows_what_is_done(terminal, tmp_path, width):
    file = tmp_path / "run.json"
    child = terminal(
        "benchmark", "-m", "60", "--temps", "0", "--trials", "40", "--json", file, width=width
    )
    child.expect("chat, ")
    while not file.exists():
        time.sleep(0.1)
    child.sendintr()
    out, status = read_all(child)
    assert status == 130 and "Traceback" not in out and "INTERRUPTED" in out
    # The heading ends with that word, and the tables follow.
    report = out[out.index("INTERRUPTED") :]
    assert max(map(len, report.splitlines())) <= width and "plain" in report
    assert not json.loads(file.read_text())["complete"]


def test_no_color_means_no_color(terminal):
    child = terminal("chat", "-m", "3")
    child.expect("›")
    child.sendline("q")
    out, status = read_all(child)
    assert status == 0 and not re.search(r"\x1b\[[0-9;]*3[0-9]m", child.before + out)
