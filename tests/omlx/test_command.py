"""The command line, from two model folders to a configuration and back, at the edge too."""

import json
import os
import pty
import runpy
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.commands import run_command
from support.omlx_tools import MODEL, FakeServer, make_base

from mlx_dflash2.omlx import command as omlx
from mlx_dflash2.omlx import locate, log, server


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A home of our own: undo records and defaults land there."""
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.delenv("OMLX_BASE_PATH", raising=False)
    monkeypatch.delenv("OMLX_MODEL_DIR", raising=False)
    monkeypatch.setattr(locate, "find_spec", lambda name: None)
    monkeypatch.setattr(log, "BREW_LOGS", ())
    return folder


@pytest.fixture
def free_url():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return f"http://127.0.0.1:{port}"


@pytest.fixture
def base(tmp_path):
    return make_base(tmp_path)


@pytest.fixture
def run(base, free_url, capsys):
    """Run a command on the base directory; return exit code, output and notes."""

    def call(command, *words, url=free_url, model=MODEL):
        argv = [command, "--base-path", str(base), "--url", url]
        argv += ["--model", model] if model and command != "status" else []
        if command in ("export", "apply"):
            drafter = base / "models" / "z-lab" / "Qwen3.8-Tiny-DFlash2"
            argv += ["--draft-model", str(drafter), "--chip", "M4 Max"]
        code = 0
        try:
            run_command("omlx", [*argv, *words])
        except SystemExit as stop:
            code = stop.code
        output = capsys.readouterr()
        return code, output.out, output.err

    return call


def test_from_folders_to_configuration_and_back(run, base):
    path = base / "model_settings.json"
    code, out, _ = run("export")
    assert code == 0 and '+  "dflash_block_size": 5,' in out and not path.exists()
    assert json.loads(out[: out.index("\n---")])["version"] == 1
    assert run("check")[0] == 1
    code, out, err = run("export", "--write")
    assert code == 0 and f"written: {path}" in err and "nothing answers on" in err
    entry = json.loads(path.read_text())["models"][MODEL]
    drafter = Path(entry["dflash_draft_model"])
    assert drafter.is_absolute() and drafter.is_dir()
    code, out, err = run("check", "--chip", "M4")
    assert code == 0 and f"{MODEL} would run with DFlash in oMLX 0.7.0 (assumed" in out
    assert err.count("warning") == 1 and "without effect in its batched engine" in err
    before = path.read_bytes()
    code, _, err = run("export", "--yes")
    assert code == 0 and "no change" in err and path.read_bytes() == before
    code, out, _ = run("disable")
    assert code == 0 and '-  "dflash_enabled": true,' in out and path.read_bytes() == before
    assert run("disable", "--write")[0] == 0
    assert json.loads(path.read_text()) == {"version": 1, "models": {}}
    code, _, err = run("disable", "--write")
    assert code == 0 and "no change" in err


def test_only_the_settings_or_only_the_change(run, base):
    code, out, _ = run("export", "--json")
    document = json.loads(out)
    assert code == 0 and document["models"][MODEL]["dflash_block_size"] == 5
    code, out, _ = run("export", "--diff", "--write")
    assert code == 0 and out.startswith("--- ") and '"version"' not in out
    assert json.loads((base / "model_settings.json").read_text()) == document
    code, out, _ = run("disable", "--diff")
    assert code == 0 and out.startswith("--- ")


@pytest.mark.parametrize(
    "words, message",
    [
        (["--block-size", "9"], "dflash_block_size: found 9, allowed: 2 to 8"),
        (["--block-size", "0"], "dflash_block_size: found 0"),
        (["--max-ctx", "0"], "dflash_max_ctx: found 0"),
        (["--set", "dflash_ssd_cache=1"], "dflash_ssd_cache: found 1, allowed: true or false"),
        (["--set", "dflash_ssd=true"], "options: found 'dflash_ssd'"),
        (["--set", "dflash_ssd_cache"], 'dflash_ssd_cache: found "", allowed: true or false'),
        (["--unset", "temperature"], "--unset: found 'temperature'"),
        (["--turn-off", "temperature"], "--turn-off: found 'temperature'"),
        (["--omlx-version", "0.6.2"], "is too old for DFlash 2"),
        (["--model-id", "a/b"], "target: found 'a/b'"),
        (["--draft-group-size", "7"], "dflash_draft_quant_group_size: found 7"),
        (["--draft-group-size", "128"], "dflash_draft_quant_group_size: found 128"),
    ],
)
def test_refusals_are_one_line(run, base, words, message):
    code, out, _ = run("export", "--write", *words)
    assert message in code and code.startswith("error: ") and "\n" not in code
    assert out == "" and not (base / "model_settings.json").exists()


def test_options_reach_the_file(run, base):
    words = ["--set", "dflash_in_memory_cache=false", "--draft-bits", "none", "--max-ctx", "32768"]
    code, _, _ = run("export", "--write", *words, "--block-size", "4", "--verify-mode", "adaptive")
    entry = json.loads((base / "model_settings.json").read_text())["models"][MODEL]
    assert code == 0 and entry["dflash_in_memory_cache"] is False
    assert entry["dflash_draft_quant_enabled"] is False and entry["dflash_max_ctx"] == 32768
    assert entry["dflash_block_size"] == 4 and entry["dflash_verify_mode"] == "adaptive"


def test_a_listening_server_stops_the_write(run, base):
    path = base / "model_settings.json"
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        code, _, err = run("export", url=url)
        assert code == 0 and "a server answers on" in err
        code, _, _ = run("export", "--write", url=url)
        assert "a server answers on" in code and not path.exists()
        run("export", "--write")
        before = path.read_bytes()
        code, _, _ = run("disable", "--write", url=url)
        assert "a server answers on" in code and path.read_bytes() == before


def test_malformed_file_is_one_line(run, base):
    (base / "model_settings.json").write_text('{"version": 1,')
    for command in ("export", "disable", "check", "status"):
        code, _, _ = run(command)
        assert "left untouched" in code and "\n" not in code


def test_check_names_what_is_wrong(run, base):
    run("export", "--write")
    path = base / "model_settings.json"
    data = json.loads(path.read_text())
    data["models"][MODEL] |= {"dflash_block_size": 9, "dflash_max_ctx": 0}
    path.write_text(json.dumps(data))
    code, out, _ = run("check", "--omlx-version", "0.6.4", "--chip", "M1")
    assert code == 1 and "would NOT run with DFlash in oMLX 0.6.4 (--omlx-version)" in out
    for words in ("block_size: found 9", "max_ctx: found 0", "activation_bits: found 16"):
        assert f"problem: dflash_{'draft_quant_' * (words[0] == 'a')}{words}" in out
    code, out, _ = run("check", "--draft-model", str(base))
    assert code == 1 and "dflash_draft_model: found" in out


def test_check_without_a_model_checks_all(run, base):
    assert "no model has DFlash on" in run("check", model=None)[0]
    run("export", "--write")
    code, out, _ = run("check", "--chip", "M4", model=None)
    assert code == 0 and f"{MODEL} would run" in out
    path = base / "model_settings.json"
    data = json.loads(path.read_text())
    other = base / "models" / "mlx-community" / "Other-4bit"
    other.mkdir()
    (other / "config.json").write_text('{"model_type": "llama"}')
    data["models"]["Other-4bit"] = data["models"][MODEL]
    data["models"]["off"] = {"dflash_enabled": False}
    path.write_text(json.dumps(data))
    code, out, _ = run("check", "--chip", "M4", model=None)
    assert code == 1 and f"{MODEL} would run" in out and "Other-4bit would NOT run" in out
    assert "off would" not in out


LOG = f"""x y DFlash enabled for {MODEL}, draft=/d
x y DFlashEngine loaded: target=/t/{MODEL}, draft=/d, a=1
x y DFlash generation complete: 5 tokens, 2.0 tok/s, acceptance=50.0%, cycles=2
x y Chat completion: model={MODEL}, 5 tokens in 2.5s (2.0 tok/s), prompt: 3
"""


def test_status_shows_all_models(run, base):
    code, out, _ = run("status")
    assert code == 0 and out.splitlines()[0].split()[:3] == ["model", "DFlash", "drafter"]
    assert [line.split()[:2] for line in out.splitlines()[1:]] == [
        ["Qwen3.8-Tiny-4bit", "off"],
        ["Qwen3.8-Tiny-DFlash2", "off"],
    ]
    run("export", "--write")
    code, out, err = run("status", "--chip", "M4")
    row = next(line for line in out.splitlines() if line.startswith(MODEL))
    assert row.split()[1:7] == "on Qwen3.8-Tiny-DFlash2 4 bits, group 64".split()
    assert row.endswith("no line about DFlash (off, no draft, another id, or not loaded yet)")
    assert f"{base / 'model_settings.json'} as read by oMLX 0.7.0" in err
    (base / "logs").mkdir()
    (base / "logs" / "server.log").write_text(LOG)
    row = next(x for x in run("status")[1].splitlines() if x.startswith(MODEL))
    assert row.endswith("50.0 %")
    path = base / "model_settings.json"
    data = json.loads(path.read_text())
    data["models"][MODEL]["dflash_draft_model"] = "/gone"
    data["models"]["not-on-this-disk"] = {"dflash_enabled": True}
    data["models"]["lost"] = {"mtp_enabled": True, "vlm_mtp_enabled": True}
    path.write_text(json.dumps(data))
    rows = run("status")[1]
    assert "drafter: found '/gone', allowed: a folder" in rows and "not-on-this-disk" in rows
    assert "vlm_mtp_enabled: found true, allowed: false beside mtp_enabled" in rows


@pytest.mark.parametrize(
    "key, entry, hint",
    [
        (f"mlx-community/{MODEL}", {}, "oMLX does not look under 'mlx-community/"),
        ("other", {"model_alias": MODEL}, "oMLX does not look under 'other'"),
    ],
)
def test_check_finds_an_entry_under_a_wrong_key(run, base, key, entry, hint):
    document = {"version": 1, "models": {key: entry}}
    (base / "model_settings.json").write_text(json.dumps(document))
    code, out, _ = run("check")
    assert code == 1 and hint in out


def test_check_reads_a_log(run, base, tmp_path):
    path = tmp_path / "server.log"
    path.write_text(LOG)
    code, out, _ = run("check", "--log", str(path), model=None)
    assert code == 0 and f"{MODEL}: DFlash ran: acceptance 50.0 %" in out
    assert out.splitlines()[1] == "  x y  5 tokens: drafts ran, acceptance 50.0 %"
    run("export", "--write")
    code, out, _ = run("check", "--log", str(path))
    assert code == 0 and "would run" in out and "acceptance 50.0 %" in out
    (base / "logs").mkdir()
    (base / "logs" / "server.log").write_text(LOG)
    assert "acceptance 50.0 %" in run("check", "--log")[1]
    path.write_text("nothing")
    assert run("check", "--log", str(path))[0] == 1
    assert run("check", "--log", str(path), model=None)[0] == 1
    assert "No such file" in run("check", "--log", str(tmp_path / "no.log"), model=None)[0]


@pytest.fixture
def fake(base):
    with FakeServer(base / "models" / "mlx-community" / MODEL) as running:
        yield running


def test_apply_with_a_key_file(run, base, fake, tmp_path):
    key = tmp_path / "key"
    key.write_text("sk-secret\n")
    key.chmod(0o600)
    words = ["--key-file", str(key)]
    for more in ([], ["--dry-run", "--write"], ["--diff"]):
        code, out, err = run("apply", *words, *more, url=fake.url)
        assert code == 0 and fake.puts == [] and "dflash_enabled" in out
        assert "nothing changed; --write makes the change" in err
    code, out, err = run("apply", "--write", *words, url=fake.url)
    assert code == 0 and fake.stored["dflash_block_size"] == 5
    assert "sk-secret" not in out + err and "has kept them" in err and "up to 10 minutes" in err
    assert not (base / "model_settings.json").exists()
    code, out, err = run("disable", "--running", *words, url=fake.url)
    assert fake.stored["dflash_enabled"] is True and "--write makes the change" in err
    code, out, _ = run("disable", "--running", "--write", *words, url=fake.url)
    assert code == 0 and not fake.stored.get("dflash_enabled")


def test_what_the_server_returned_is_not_warned_about(run, fake):
    fake.key = None
    fake.stored |= {"dflash_max_concurrent": 4, "qwen35_ane_prefill_gdn": True}
    _, _, err = run("apply", url=fake.url)
    assert "not known here" not in err and err.count("warning") == 1
    assert f"oMLX 0.7.0 ({fake.url}): without effect" in err


def test_apply_asks_for_the_key(run, fake, monkeypatch):
    monkeypatch.setattr("getpass.getpass", lambda prompt: "sk-secret")
    assert run("apply", "--write", url=fake.url)[0] == 0
    monkeypatch.setattr("getpass.getpass", lambda prompt: "sk-wrong")
    code, out, err = run("apply", url=fake.url)
    assert "HTTP 401: Invalid API key" in code and "sk-wrong" not in code + out + err


def test_apply_without_a_key_where_none_is_asked_for(run, fake):
    fake.key = None
    assert run("apply", "--no-reload", "--yes", url=fake.url)[0] == 0
    assert "POST /admin/api/login" not in fake.calls
    assert "POST /admin/api/reload" not in fake.calls


def test_key_never_on_the_command_line(capsys):
    with pytest.raises(SystemExit):
        run_command("omlx", ["apply", "--help"])
    assert "--key " not in capsys.readouterr().out


def test_readable_key_file_and_clear_network_are_warned_about(run, capsys, tmp_path):
    key = tmp_path / "key"
    key.write_text("sk")
    key.chmod(0o644)
    assert omlx._read_key(str(key)) == "sk"
    assert "other users" in capsys.readouterr().err
    code, _, err = run("apply", url="http://no-such-host.invalid:1")
    assert "no whole answer" in code and "in clear" in err


def test_chip_must_be_known_where_it_counts(run, base, monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    drafter = base / "models" / "z-lab" / "Qwen3.8-Tiny-DFlash2"
    words = ["export", "--base-path", str(base), "--model", MODEL, "--draft-model", str(drafter)]
    with pytest.raises(SystemExit, match="chip: found ''"):
        run_command("omlx", [*words, "--omlx-version", "0.6.4"])
    run_command("omlx", [*words, "--omlx-version", "0.7.0"])
    run_command("omlx", [*words, "--omlx-version", "0.6.4", "--draft-bits", "none"])


def test_module_and_package_entry_points(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["mlx_dflash2.omlx", "--help"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("mlx_dflash2.omlx", run_name="__main__")
    assert stop.value.code == 0 and "export" in capsys.readouterr().out


def test_the_command_itself_starts_neither_mlx_nor_a_hub_client():
    """The package's own ``__init__`` is left out: what it imports is not this command's affair."""
    script = """
import sys, types
package = types.ModuleType("mlx_dflash2")
package.__path__ = [sys.argv[1]]
sys.modules["mlx_dflash2"] = package
import mlx_dflash2.omlx.command
heavy = {"mlx", "mlx_lm", "transformers", "huggingface_hub", "numpy", "rich"}
print(sorted(heavy & sys.modules.keys()))
"""
    folder = Path(omlx.__file__).parents[1]
    command = [sys.executable, "-c", script, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# At the terminal


@pytest.fixture
def process(base, home):
    """Start the command in a process of its own, on a terminal of its own where asked."""

    def start(command, *words, url, terminal=False, **streams):
        drafter = base / "models" / "z-lab" / "Qwen3.8-Tiny-DFlash2"
        argv = [sys.executable, "-m", "mlx_dflash2.omlx", command, "--base-path", str(base)]
        argv += ["--url", url, "--model", MODEL, "--draft-model", str(drafter), "--chip", "M4"]
        main = 0
        if terminal:
            main, other = pty.openpty()
            streams = {"stdin": other, "stdout": other, "stderr": other, **streams}
        else:
            streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
        environment = {**os.environ, "HOME": str(home)}
        started = subprocess.Popen(
            [*argv, *words], env=environment, start_new_session=True, **streams
        )
        if terminal:
            os.close(other)
        return started, main

    return start


def read_until(main, words):
    """What a terminal shows, until it shows some words or closes."""
    text = b""
    while words.encode() not in text:
        try:
            more = os.read(main, 4096)
        except OSError:
            break
        if not more:
            break
        text += more
    return text.decode()


CONTROL_C, CONTROL_D = b"\x03", b"\x04"


@pytest.mark.parametrize("pressed", [CONTROL_C, CONTROL_D])
def test_leaving_the_prompt_for_the_key(process, fake, pressed):
    started, main = process("apply", url=fake.url, terminal=True)
    assert "oMLX API key:" in read_until(main, "key:")
    if pressed == CONTROL_C:
        os.kill(started.pid, signal.SIGINT)
    else:
        os.write(main, pressed)
    rest = read_until(main, "no such words")
    code = started.wait(20)
    os.close(main)
    assert "Traceback" not in rest and fake.puts == []
    if pressed == CONTROL_C:
        assert code == 130
    else:
        assert code == 1 and "error: no API key was given" in rest


def test_no_terminal_to_ask_for_the_key(process, fake):
    started, _ = process("apply", url=fake.url, stdin=subprocess.DEVNULL)
    out, err = started.communicate(timeout=30)
    assert started.returncode == 1 and out == b""
    assert err.decode().splitlines() == [
        "error: no API key was given; --key-file names a file with it"
    ]


@pytest.mark.parametrize("answer, sent", [(b"y\n", 1), (b"\n", 0), (CONTROL_D, 0)])
def test_apply_asks_before_it_changes_anything(process, fake, answer, sent):
    fake.key = None
    started, main = process("apply", url=fake.url, terminal=True)
    shown = read_until(main, "[y/N] ")
    assert (
        '+  "dflash_enabled": true' in shown.replace("\r", "") or '"dflash_enabled": true' in shown
    )
    os.write(main, answer)
    rest = read_until(main, "no such words")
    assert started.wait(20) == 0 and "Traceback" not in rest
    os.close(main)
    assert len(fake.puts) == sent


def test_a_closed_pipe_is_quiet(process, free_url):
    reading, writing = os.pipe()
    os.close(reading)
    started, _ = process("export", url=free_url, stdout=writing)
    os.close(writing)
    _, err = started.communicate(timeout=30)
    assert started.returncode == 141 and b"Traceback" not in err and b"error" not in err


def test_an_error_of_the_system_names_the_file(run, base):
    path = base / "model_settings.json"
    path.mkdir()
    for command in ("export", "disable", "check", "status"):
        code, _, _ = run(command)
        assert str(path) in code and code.startswith("error: ")


def test_a_server_that_never_answers_is_not_waited_for(run, monkeypatch):
    monkeypatch.setattr(server.Admin.__init__, "__defaults__", (0.3,))
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        start = time.monotonic()
        code, _, _ = run("apply", url=url)
        assert "no whole answer (not within 0.3 s)" in code and time.monotonic() - start < 5
