"""The settings manager of the published `flyto-mlx` package reads, and saves, what we wrote."""

import json
import os
import subprocess
import sys

import pytest
from support.omlx_tools import MODEL, readme_example, settings

from mlx_dflash2.omlx import disable_settings, merge_settings
from mlx_dflash2.omlx.fields import dataclass_fields

pytestmark = pytest.mark.slow

# Its package imports a whole server; only the two modules of the settings are wanted here.
MANAGER = """
import importlib.util, json, logging, sys, types
from dataclasses import field, make_dataclass
logging.basicConfig(level=logging.WARNING)
base, model, newer = sys.argv[1], sys.argv[2], sys.argv[3] == "newer"
package = types.ModuleType("omlx")
package.__path__ = importlib.util.find_spec("omlx").submodule_search_locations
sys.modules["omlx"] = package
from omlx import model_settings as m
if newer:
    added = [(n, object, field(default=None)) for n in ("dflash_block_size", "dflash_verify_mode")]
    m.ModelSettings = make_dataclass("ModelSettings", added, bases=(m.ModelSettings,))
manager = m.ModelSettingsManager(base)
read = {name: s.to_dict() for name, s in manager.get_all_settings().items()}
changed = manager.get_settings(model)
changed.description = "saved by the manager"
manager.set_settings(model, changed)
again = m.ModelSettingsManager(base)
saved = {name: s.to_dict() for name, s in again.get_all_settings().items()}
print(json.dumps({"read": read, "saved": saved, "source": m.__file__}))
"""

BEFORE = {
    "version": 1,
    "models": {
        "gpt-oss-20b-MXFP4": {"temperature": 0.7, "is_pinned": True},
        "mlx-community--Other-4bit": {"model_alias": "fast", "ttl_seconds": 900},
        MODEL: {"model_alias": "qwen", "top_k": 20, "mtp_enabled": True},
    },
}


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """An environment that holds flyto-mlx and nothing that it depends on."""
    folder = tmp_path_factory.mktemp("flyto")
    python = folder / "bin" / "python"
    for command in (
        [sys.executable, "-m", "venv", str(folder)],
        [str(python), "-m", "pip", "install", "-q", "--no-deps", "flyto-mlx==0.7.0"],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"flyto-mlx cannot be had: {done.stderr.strip()[-300:]}")
    return python


def run_manager(python, base, build):
    command = [str(python), "-c", MANAGER, str(base), MODEL, build]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return json.loads(done.stdout), done.stderr


@pytest.mark.parametrize("build", ["published", "newer"])
def test_manager_reads_and_keeps_our_settings(python, tmp_path, build):
    """`newer` adds the keys that this fork does not have yet to its own dataclass."""
    path = tmp_path / "model_settings.json"
    path.write_text(json.dumps(BEFORE))
    undo = tmp_path / "undo"
    merge_settings(path, settings(), replace_mtp=True, write=True, undo_dir=undo)
    found, warnings = run_manager(python, tmp_path, build)
    assert warnings == "" and "site-packages" in found["source"]
    newer = {"dflash_block_size", "dflash_verify_mode"}
    ours = settings()["models"][MODEL]
    expected = {k: v for k, v in ours.items() if build == "newer" or k not in newer}
    for state in (found["read"], found["saved"]):
        assert list(state) == list(BEFORE["models"])
        assert state[MODEL].items() >= (BEFORE["models"][MODEL] | expected).items()
        for name in list(BEFORE["models"])[:2]:
            assert state[name].items() >= BEFORE["models"][name].items()
    assert found["saved"][MODEL]["description"] == "saved by the manager"
    # The manager has rewritten the file: with every default, and without keys it does not know.
    again = merge_settings(path, settings(), undo_dir=undo)
    assert again.empty == (build == "newer")
    disable_settings(path, MODEL, write=True, undo_dir=undo)
    restored, warnings = run_manager(python, tmp_path, build)
    entry = restored["read"][MODEL]
    assert warnings == "" and entry["mtp_enabled"] is True and entry["dflash_enabled"] is False
    assert not entry.keys() & {"dflash_draft_model", "dflash_draft_quant_enabled", *newer}
    assert (entry["model_alias"], entry["top_k"]) == ("qwen", 20)


@pytest.mark.parametrize("build", ["published", "newer"])
def test_manager_reads_the_example_of_the_readme(python, tmp_path, build):
    document = readme_example()
    (tmp_path / "model_settings.json").write_text(json.dumps(document))
    ((model, ours),) = document["models"].items()
    command = [str(python), "-c", MANAGER, str(tmp_path), model, build]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert done.stderr == ""
    for state in (found["read"], found["saved"]):
        kept = ours.items() & state[model].items()
        lost = ours.keys() - dict(kept).keys()
        expected = set() if build == "newer" else {"dflash_block_size", "dflash_verify_mode"}
        assert lost == expected


def test_entry_with_mtp_left_on_would_be_lost(python, tmp_path):
    """What the export refuses to write: the manager drops the entry and erases it on saving."""
    document = json.loads(json.dumps(BEFORE))
    document["models"][MODEL] |= settings()["models"][MODEL] | {"mtp_enabled": True}
    (tmp_path / "model_settings.json").write_text(json.dumps(document))
    found, warnings = run_manager(python, tmp_path, "published")
    assert MODEL not in found["read"] and "cannot both be True" in warnings


def test_its_source_names_the_keys(python):
    found = subprocess.run(
        [str(python), "-c", "import importlib.util as i; print(i.find_spec('omlx').origin)"],
        capture_output=True,
        text=True,
        check=True,
    )
    source = os.path.join(os.path.dirname(found.stdout.strip()), "model_settings.py")
    with open(source, encoding="utf-8") as stream:
        names = dataclass_fields(stream.read())
    assert {"dflash_enabled", "dflash_draft_model", "mtp_enabled", "model_alias"} <= names
    assert "dflash_block_size" not in names
