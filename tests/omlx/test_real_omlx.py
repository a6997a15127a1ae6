"""The published flyto-mlx, a fork of oMLX: its settings classes, and its server."""

import json
import logging
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from support import real_omlx
from support.commands import run_command
from support.omlx_tools import (
    MODEL,
    TARGET_CONFIG,
    documents,
    make_folder,
    readme_example,
    settings,
)
from support.real_omlx import KEY, RealServer
from support.saved_models import save_drafter, save_target

from mlx_dflash2.checkpoint.files import read_config
from mlx_dflash2.omlx import disable_settings, merge_settings
from mlx_dflash2.omlx.locate import OmlxVersion
from mlx_dflash2.omlx.settings import RULES, SWITCHES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
TARGET = "Tiny-Qwen3"


@pytest.fixture(scope="session")
def python(request):
    return real_omlx.install(request.config.cache.mkdir("flyto-mlx"))


@pytest.fixture(scope="session")
def sites(python, tmp_path_factory):
    """Where the package is found: as published, and with what oMLX 0.7 added."""
    published = real_omlx.package(python).parent
    return {
        "published": published,
        "newer": real_omlx.newer(python, tmp_path_factory.mktemp("newer")),
    }


@pytest.fixture(params=["published", "newer"])
def module(request, sites):
    logging.getLogger().setLevel(logging.WARNING)
    return real_omlx.settings_module(sites[request.param])


def loaded(module, folder):
    """The settings of all models as the manager reads them, and again after it saved them."""
    manager = module.ModelSettingsManager(folder)
    read = {name: entry.to_dict() for name, entry in manager.get_all_settings().items()}
    manager.set_settings("another", module.ModelSettings())
    again = module.ModelSettingsManager(folder)
    saved = {name: entry.to_dict() for name, entry in again.get_all_settings().items()}
    saved.pop("another")
    return read, saved


def test_the_manager_reads_and_keeps_our_settings(module, tmp_path):
    path, undo = tmp_path / "model_settings.json", tmp_path / "undo"
    before = {
        "gpt-oss-20b": {"temperature": 0.7, "is_pinned": True},
        "mlx-community--Other-4bit": {"model_alias": "fast", "ttl_seconds": 900},
        MODEL: {"model_alias": "qwen", "top_k": 20, "mtp_enabled": True},
    }
    path.write_text(json.dumps({"version": 1, "models": before}))
    document = settings()
    merge_settings(path, document, turn_off=["mtp_enabled"], write=True, undo_dir=undo)
    newer = hasattr(module.ModelSettings, "dflash_block_size")
    ours = document["models"][MODEL]
    for state in loaded(module, tmp_path):
        assert list(state) == list(before)
        kept = ours.items() & state[MODEL].items()
        lost = ours.keys() - dict(kept).keys()
        assert lost == (set() if newer else {"dflash_block_size", "dflash_verify_mode"})
        for name in before:
            expected = before[name] | ({"mtp_enabled": False} if name == MODEL else {})
            assert state[name].items() >= expected.items()
    # The manager has rewritten the file, with every default.
    disable_settings(path, MODEL, write=True, undo_dir=undo)
    entry = loaded(module, tmp_path)[0][MODEL]
    assert entry["mtp_enabled"] is True and entry["dflash_enabled"] is False
    assert "dflash_draft_model" not in entry and entry["top_k"] == 20


def test_the_manager_reads_the_example_of_the_readme(module, tmp_path):
    (tmp_path / "model_settings.json").write_text(json.dumps(readme_example()))
    ((name, ours),) = readme_example()["models"].items()
    newer = hasattr(module.ModelSettings, "dflash_block_size")
    for state in loaded(module, tmp_path):
        lost = {key for key, value in ours.items() if state[name].get(key) != value}
        assert lost == (set() if newer else {"dflash_block_size", "dflash_verify_mode"})


_SWITCHES = ("mtp_enabled", "vlm_mtp_enabled", "moe_expert_offload_enabled")


@hypothesis_settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(text=documents(risky=True), off=st.sets(st.sampled_from(_SWITCHES)), data=st.data())
def test_no_model_is_lost(module, text, off, data):
    """Any document, our change and its undo: what the real classes loaded, they still load."""
    with tempfile.TemporaryDirectory() as folder:
        path, undo = Path(folder) / "model_settings.json", Path(folder) / "undo"

        def names():
            copy = Path(folder) / "copy"
            copy.mkdir(exist_ok=True)
            shutil.copy(path, copy)
            return set(module.ModelSettingsManager(copy).get_all_settings())

        path.write_text(text, encoding="utf-8")
        before = names()
        try:
            merge_settings(path, settings(), turn_off=off, write=True, undo_dir=undo)
        except ValueError as error:
            assert path.read_text(encoding="utf-8") == text and "\n" not in str(error)
            return
        assert names() >= before | {MODEL}
        # Somebody turns other switches on before the undo.
        document = json.loads(path.read_text(encoding="utf-8"))
        entry = document["models"][MODEL]
        for key in data.draw(st.sets(st.sampled_from(_SWITCHES))):
            entry[key] = True
        entry["dflash_enabled"] = data.draw(st.booleans())
        path.write_text(json.dumps(document), encoding="utf-8")
        before = names()
        disable_settings(path, MODEL, write=True, undo_dir=undo)
        after = json.loads(path.read_text(encoding="utf-8"))["models"]
        assert names() >= before & after.keys() and before - {MODEL} <= after.keys()


@pytest.mark.parametrize("rule", RULES, ids=[rule.key for rule in RULES])
def test_what_is_refused_would_be_lost(sites, tmp_path, rule):
    module = real_omlx.settings_module(sites["newer"])
    bad = {rule.key: True if rule.key in SWITCHES else 0}
    bad |= {key: True for key in rule.beside if key not in SWITCHES}
    entry = bad | settings()["models"][MODEL] | bad
    path = tmp_path / "model_settings.json"
    path.write_text(json.dumps({"version": 1, "models": {MODEL: entry, "b": {"top_k": 1}}}))
    assert list(loaded(module, tmp_path)[1]) == ["b"]
    path.write_text(json.dumps({"version": 1, "models": {MODEL: bad | {"dflash_enabled": False}}}))
    with pytest.raises(ValueError, match=f"{rule.key}: found .*, allowed: .*{rule.remedy}"):
        merge_settings(path, settings(), undo_dir=tmp_path / "undo")


def test_version_and_keys_are_read_from_the_package(sites, monkeypatch):
    monkeypatch.syspath_prepend(str(sites["published"]))
    found = OmlxVersion.find(None, "http://127.0.0.1:9")
    assert found.number == "0.7.0" and found.source.endswith("omlx")
    assert {"dflash_enabled", "mtp_enabled", "model_alias"} <= found.keys
    with pytest.raises(ValueError, match="is too old for DFlash 2"):
        found.check()


@pytest.fixture(params=["published", "newer"])
def server(request, python, sites, tmp_path):
    base = tmp_path / "base"
    save_target(base / "models" / "mlx-community" / TARGET)
    save_drafter(base / "models" / "z-lab" / "Tiny-DFlash2")
    with RealServer(python, sites[request.param], base) as running:
        running.newer = request.param == "newer"
        yield running


@pytest.fixture
def omlx(server, tmp_path, monkeypatch, capsys):
    """Run a command against the server; return exit code, output and notes."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("OMLX_BASE_PATH", raising=False)
    key = tmp_path / "key"
    key.write_text(KEY)
    key.chmod(0o600)

    def run(name, *words):
        argv = [name, "--base-path", str(server.base), "--url", server.url]
        if name != "status":
            argv += ["--model", TARGET]
        if name in ("apply", "disable"):
            argv += ["--key-file", str(key)]
        if name == "apply":
            drafter = server.base / "models" / "z-lab" / "Tiny-DFlash2"
            argv += ["--draft-model", str(drafter), "--draft-bits", "none"]
        argv += words
        code = 0
        try:
            run_command("omlx", argv)
        except SystemExit as stop:
            code = stop.code
        output = capsys.readouterr()
        return code, output.out, output.err

    return run


def stored(server, model=TARGET):
    path = server.base / "model_settings.json"
    return json.loads(path.read_text())["models"].get(model, {}) if path.exists() else {}


def test_apply_reload_check_chat_and_disable(server, omlx, tmp_path):
    code, out, _ = omlx("apply")
    assert code == 0 and '"dflash_enabled": true' in out and stored(server) == {}
    wrong = tmp_path / "wrong"
    wrong.write_text("sk-wrong")
    code, _, _ = omlx("apply", "--write", "--key-file", str(wrong))
    assert "HTTP 401: Invalid API key" in code and "sk-wrong" not in code
    code, _, err = omlx("apply", "--write")
    if not server.newer:
        assert "is too old for DFlash 2" in code and "the settings are as before" in code
        assert not stored(server).get("dflash_enabled")
        assert not list((tmp_path / "home").rglob("*.json"))
        assert "choices" in server.chat(TARGET)
        return
    assert code == 0 and "has kept them" in err
    entry = stored(server)
    size = read_config(server.base / "models" / "z-lab" / "Tiny-DFlash2")["dflash_config"][
        "block_size"
    ]
    assert entry["dflash_enabled"] is True and entry["dflash_block_size"] == size
    code, out, err = omlx("check")
    assert code == 0 and f"{TARGET} would run with DFlash in oMLX 0.7.0 ({server.url})" in out
    # What the server wrote itself is not warned about, but for the fork's own two keys.
    assert err.count("not known here") == 1 and "dflash_max_concurrent" in err
    assert "choices" in server.chat(TARGET, stream=True)
    code, out, _ = omlx("check", "--log")
    # The fork's dflash-mlx does not know DFlash 2, so it answers without.
    assert code == 1 and "fell back to plain decoding" in out and "8 tokens: no drafts" in out
    code, out, _ = omlx("status")
    assert code == 0 and "on" in out and "fell back" in out and "Tiny-DFlash2" in out
    code, out, err = omlx("disable", "--running", "--write")
    assert code == 0 and '-  "dflash_enabled": true,' in out and "has kept them" in err
    assert stored(server).get("dflash_enabled") is False
    assert "dflash_block_size" not in stored(server)
    assert "choices" in server.chat(TARGET)


def test_undo_crosses_from_the_file_to_the_server(server, omlx, tmp_path):
    """Exported while stopped, with MTP replaced; disabled on the running server."""
    if not server.newer:
        pytest.skip("as published it keeps no block size")
    config = TARGET_CONFIG["text_config"] | {"mtp_num_hidden_layers": 1}
    weights = ("model.embed_tokens.weight", "mtp.fc.weight")
    folder = server.base / "models" / "mlx-community" / MODEL
    make_folder(folder, TARGET_CONFIG | {"text_config": config}, weights)
    path, undo = server.base / "model_settings.json", tmp_path / "home" / ".mlx_dflash2" / "omlx"
    path.write_text(json.dumps({"version": 1, "models": {MODEL: {"mtp_enabled": True}}}))
    drafter = str((server.base / "models" / "z-lab" / "Tiny-DFlash2").resolve())
    document = settings(MODEL, drafter, quant=None, block_size=4)
    merge_settings(path, document, turn_off=["mtp_enabled"], write=True, undo_dir=undo)
    real_omlx.call(server, "POST", "/admin/api/reload")
    code, _, _ = omlx("disable", "--running", "--write", "--model", MODEL)
    assert code == 0 and stored(server, MODEL)["mtp_enabled"] is True
    assert stored(server, MODEL)["dflash_enabled"] is False and not list(undo.glob("*"))
