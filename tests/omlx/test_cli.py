"""The command line, from two model folders to a configuration and back."""

import json
import runpy
import socket
import sys
from pathlib import Path

import pytest
from support.omlx_tools import MODEL, FakeServer, make_base

from mlx_dflash2.omlx import command as omlx


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A home of our own: undo records and defaults land there."""
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.delenv("OMLX_BASE_PATH", raising=False)
    monkeypatch.delenv("OMLX_MODEL_DIR", raising=False)
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
    """Run a command on the base directory; return exit code, output and errors."""

    def call(command, *words, url=free_url):
        argv = [command, "--base-path", str(base), "--model", MODEL, *words]
        if command in ("export", "apply"):
            drafter = base / "models" / "z-lab" / "Qwen3.8-Tiny-DFlash2"
            argv += ["--draft-model", str(drafter), "--chip", "M4 Max"]
        if command != "check":
            argv += ["--url", url]
        code = 0
        try:
            omlx.main(argv)
        except SystemExit as stop:
            code = stop.code
        output = capsys.readouterr()
        return code, output.out, output.err

    return call


def test_from_folders_to_configuration_and_back(run, base):
    path = base / "model_settings.json"
    code, out, _ = run("export")
    assert code == 0 and '+      "dflash_block_size": 5,' in out and not path.exists()
    assert json.loads(out[: out.index("\n---")])["version"] == 1
    code, _, _ = run("check")
    assert code == 1
    code, out, err = run("export", "--write")
    assert code == 0 and "DFlashEngine loaded" in out and f"{base}/logs/server.log" in out
    assert "nothing answers on" in err
    entry = json.loads(path.read_text())["models"][MODEL]
    drafter = Path(entry["dflash_draft_model"])
    assert drafter.is_absolute() and drafter.is_dir()
    code, out, err = run("check", "--chip", "M4")
    assert (code, err) == (0, "") and "would run with DFlash" in out
    before = path.read_bytes()
    code, out, _ = run("export", "--write")
    assert code == 0 and "no change" in out and path.read_bytes() == before
    code, out, _ = run("disable")
    assert code == 0 and '-      "dflash_enabled": true,' in out and path.read_bytes() == before
    code, out, _ = run("disable", "--write")
    assert code == 0 and json.loads(path.read_text()) == {"version": 1, "models": {}}
    code, out, _ = run("disable", "--write")
    assert code == 0 and "no change" in out


@pytest.mark.parametrize(
    "words, message",
    [
        (["--block-size", "9"], "dflash_block_size: found 9, allowed: 2 to 8"),
        (["--block-size", "0"], "dflash_block_size: found 0"),
        (["--max-ctx", "0"], "dflash_max_ctx: found 0"),
        (["--set", "dflash_ssd_cache=1"], "dflash_ssd_cache: found 1, allowed: true or false"),
        (["--set", "dflash_ssd=true"], "settings key: found 'dflash_ssd'"),
        (["--set", "dflash_ssd_cache"], "--set: found 'dflash_ssd_cache'"),
        (["--unset", "temperature"], "settings key: found 'temperature'"),
        (["--omlx-version", "0.6.2"], "cannot load a DFlash 2 drafter"),
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
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        code, _, err = run("export", url=url)
        assert code == 0 and "a server answers on" in err
        code, _, _ = run("export", "--write", url=url)
        assert "a server answers on" in code
        code, _, _ = run("disable", "--write", url=url)
        assert "a server answers on" in code
    assert not (base / "model_settings.json").exists()


def test_malformed_file_is_one_line(run, base):
    (base / "model_settings.json").write_text('{"version": 1,')
    for command in ("export", "disable", "check"):
        code, _, _ = run(command)
        assert "left untouched" in code and "\n" not in code


def test_check_names_what_is_wrong(run, base):
    def entry(**values):
        run("export", "--write")
        path = base / "model_settings.json"
        data = json.loads(path.read_text())
        data["models"][MODEL].update(values)
        path.write_text(json.dumps(data))
        return run("check", "--chip", "M1")[1]

    assert "activation_bits: found 16, allowed: 32 on M1" in entry()
    assert "the chip is not known" in run("check")[2] or sys.platform == "darwin"
    assert "dflash_enabled: found false" in entry(dflash_enabled=False)
    assert "dflash_block_size: found 9, allowed: 2 to 8" in entry(dflash_block_size=9)
    assert "dflash_draft_model: found 'bare-name'" in entry(dflash_draft_model="bare-name")
    assert "drafter: found '/no/such'" in entry(dflash_draft_model="/no/such")
    assert "dflash_draft_model: found no such key" in entry(dflash_draft_model=None)
    (base / "model_settings.json").unlink()
    run("export", "--write")
    code, out, _ = run("check", "--omlx-version", "0.6.2")
    assert code == 1 and "too old for DFlash 2" in out
    code, out, _ = run("check", "--draft-model", str(base))
    assert code == 1 and "would NOT run" in out


@pytest.mark.parametrize(
    "key, entry, hint",
    [
        (f"mlx-community/{MODEL}", {}, "which oMLX does not find"),
        ("other", {"model_alias": MODEL}, "alias of 'other'"),
    ],
)
def test_check_finds_an_entry_under_a_wrong_key(run, base, key, entry, hint):
    document = {"version": 1, "models": {key: entry}}
    (base / "model_settings.json").write_text(json.dumps(document))
    code, out, _ = run("check")
    assert code == 1 and hint in out


def test_check_reads_a_log(run, base, tmp_path, capsys):
    log = tmp_path / "server.log"
    log.write_text(
        f"x DFlash enabled for {MODEL}, draft=/d\nx DFlashEngine loaded: target=/t, draft=/d, a=1\n"
        "x DFlash generation complete: 5 tokens, 2.0 tok/s, acceptance=50.0%, cycles=2\n"
    )
    omlx.main(["check", "--log", str(log)])
    assert "acceptance 50.0 %" in capsys.readouterr().out
    run("export", "--write")
    code, out, _ = run("check", "--log", str(log))
    assert code == 0 and "acceptance 50.0 %" in out
    log.write_text("nothing")
    assert run("check", "--log", str(log))[0] == 1
    with pytest.raises(SystemExit, match="found neither"):
        omlx.main(["check"])
    with pytest.raises(SystemExit, match="No such file"):
        omlx.main(["check", "--log", str(tmp_path / "no.log")])


@pytest.fixture
def server(base):
    with FakeServer(base / "models" / "mlx-community" / MODEL) as running:
        yield running


def test_apply_with_a_key_file(run, base, server, tmp_path):
    key = tmp_path / "key"
    key.write_text("sk-secret\n")
    key.chmod(0o600)
    words = ["--key-file", str(key)]
    code, out, err = run("apply", "--dry-run", *words, url=server.url)
    assert code == 0 and server.puts == [] and "dflash_enabled" in out
    code, out, err = run("apply", *words, url=server.url)
    assert code == 0 and server.stored["dflash_block_size"] == 5
    assert "sk-secret" not in out + err and "has kept them" in out
    assert not (base / "model_settings.json").exists()
    code, out, _ = run("disable", "--running", *words, url=server.url)
    assert server.stored["dflash_enabled"] is True and "--write makes the change" in out
    code, out, _ = run("disable", "--running", "--write", *words, url=server.url)
    assert code == 0 and not server.stored.get("dflash_enabled")


def test_apply_asks_for_the_key(run, server, monkeypatch):
    monkeypatch.setattr("getpass.getpass", lambda prompt: "sk-secret")
    assert run("apply", url=server.url)[0] == 0
    monkeypatch.setattr("getpass.getpass", lambda prompt: "sk-wrong")
    code, out, err = run("apply", url=server.url)
    assert "HTTP 401: Invalid API key" in code and "sk-wrong" not in code + out + err


def test_apply_without_a_key_where_none_is_asked_for(run, server):
    server.key = None
    assert run("apply", "--no-reload", url=server.url)[0] == 0
    assert "POST /admin/api/login" not in server.calls


def test_key_never_on_the_command_line(capsys):
    with pytest.raises(SystemExit):
        omlx.main(["apply", "--help"])
    assert "--key " not in capsys.readouterr().out


def test_readable_key_file_and_clear_network_are_warned_about(capsys, tmp_path):
    key = tmp_path / "key"
    key.write_text("sk")
    key.chmod(0o644)
    from mlx_dflash2.omlx import command as cli

    assert cli._read_key(str(key)) == "sk"
    with pytest.raises(ValueError):
        cli._session("http://no-such-host.invalid:1", None)
    err = capsys.readouterr().err
    assert "other users" in err and "in clear" in err


def test_chip_must_be_known(run, base, monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    with pytest.raises(SystemExit, match="give --chip"):
        drafter = base / "models" / "z-lab" / "Qwen3.8-Tiny-DFlash2"
        words = ["--model", MODEL, "--draft-model", str(drafter)]
        omlx.main(["export", "--base-path", str(base), *words])


def test_module_and_package_entry_points(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["mlx_dflash2.omlx", "--help"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("mlx_dflash2.omlx", run_name="__main__")
    assert stop.value.code == 0 and "export" in capsys.readouterr().out
    assert omlx.setup_arg_parser().prog == "mlx_dflash2.omlx"
