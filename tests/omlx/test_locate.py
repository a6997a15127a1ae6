"""Finding oMLX's files and models, and whether target and drafter fit."""

import hashlib
import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from support.omlx_tools import (
    DRAFTER_CONFIG,
    MODEL,
    TARGET_CONFIG,
    make_base,
    make_folder,
)

from mlx_dflash2.omlx.fit import check_pair, check_quant, check_weights
from mlx_dflash2.omlx.locate import base_dir, discover, find_drafter, find_target, server_answers


@pytest.fixture
def home(tmp_path):
    (tmp_path / ".omlx").mkdir()
    return tmp_path


def app_file(home, text):
    path = home / "Library" / "Application Support" / "oMLX" / "base-path"
    path.parent.mkdir(parents=True)
    path.write_text(text)


def test_base_directory_in_order(home):
    for name in ("flag", "env", "app"):
        (home / name).mkdir()
    assert base_dir(None, {}, home) == home / ".omlx"
    app_file(home, f"  {home / 'app'}\n")
    assert base_dir(None, {}, home) == home / "app"
    with pytest.raises(ValueError, match="base directory: found"):
        base_dir(None, {"OMLX_BASE_PATH": str(home / "env")}, home)
    assert base_dir(None, {"OMLX_BASE_PATH": str(home / "app")}, home) == home / "app"
    everything = {"OMLX_BASE_PATH": str(home / "env")}
    assert base_dir(str(home / "flag"), everything, home) == home / "flag"


def test_two_directories_with_settings_are_ambiguous(home):
    (home / "env").mkdir()
    environ = {"OMLX_BASE_PATH": str(home / "env")}
    assert base_dir(None, environ, home) == home / "env"
    (home / ".omlx" / "model_settings.json").write_text("{}")
    with pytest.raises(ValueError, match="choose with --base-path"):
        base_dir(None, environ, home)
    (home / "env").rmdir()
    (home / "env").symlink_to(home / ".omlx")
    assert base_dir(None, environ, home) == home / "env"


def test_missing_base_directory_is_not_created(home):
    for given, environ in ((str(home / "no"), {}), (None, {"OMLX_BASE_PATH": str(home / "no")})):
        with pytest.raises(FileNotFoundError, match="base directory"):
            base_dir(given, environ, home)
    assert not (home / "no").exists()


def test_discovery_is_two_levels_deep_and_first_wins(tmp_path):
    for folder in ("m/A", "m/org/B", "m/org/A", "m/zorg/B", "m/.hidden/C", "m/x/y/D", "n/E"):
        make_folder(tmp_path / folder, {})
    (make_folder(tmp_path / "m" / "F", {}) / "adapter_config.json").write_text("{}")
    found = discover([tmp_path / "m", tmp_path / "n", tmp_path / "nowhere"])
    names = {name: str(path.relative_to(tmp_path)) for name, path in found.items()}
    assert names == {"A": "m/A", "B": "m/org/B", "E": "n/E"}


def test_target_by_folder_and_by_name(tmp_path):
    models = make_base(tmp_path) / "models"
    folder = models / "mlx-community" / MODEL
    for given in (str(folder), f"{folder}/", f"{folder}/../{MODEL}", MODEL):
        found = find_target(given, [models])
        assert (found.model_id, found.folder, found.warnings) == (MODEL, folder, ())
    assert find_target(str(folder), [models], "renamed").model_id == "renamed"


def test_target_refusals(tmp_path):
    models = make_base(tmp_path) / "models"
    with pytest.raises(ValueError, match="never finds an id with '/'"):
        find_target(f"mlx-community/{MODEL}", [models])
    with pytest.raises(ValueError, match=f"allowed: a model folder, or one of .*{MODEL}"):
        find_target("no-such-model", [models])
    second = make_folder(models / "zzz" / MODEL, TARGET_CONFIG)
    with pytest.raises(ValueError, match="comes first among models named"):
        find_target(str(second), [models])
    outside = find_target(str(make_folder(tmp_path / "else" / "X", TARGET_CONFIG)), [models])
    assert outside.model_id == "X" and "--model-dir" in outside.warnings[0]


def test_linked_target_has_the_name_of_the_link(tmp_path):
    models = make_base(tmp_path) / "models"
    real = make_folder(tmp_path / "store" / "abc123", TARGET_CONFIG)
    (models / "Linked").symlink_to(real)
    found = find_target(str(models / "Linked"), [models])
    assert found.model_id == "Linked" and found.warnings == ()


def test_target_is_named_as_its_folder_is_listed(tmp_path, monkeypatch):
    """As on a file system that opens `tiny` too where the folder is listed as `Tiny`."""
    listed = make_folder(tmp_path / "Tiny", TARGET_CONFIG)
    (tmp_path / "tiny").symlink_to(listed)
    monkeypatch.setattr(Path, "iterdir", lambda self: iter([listed]))
    assert find_target(str(tmp_path / "tiny"), [tmp_path]).model_id == "Tiny"


def hub(tmp_path, name="models--mlx-community--Tiny", config=TARGET_CONFIG):
    folder = tmp_path / "hub" / name
    make_folder(folder / "snapshots" / "aaa", config)
    make_folder(folder / "snapshots" / "bbb", config)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("aaa")
    return folder


def test_target_in_the_hub_cache(tmp_path):
    folder = hub(tmp_path)
    for given in (folder, folder / "snapshots" / "aaa"):
        found = find_target(str(given), [tmp_path])
        assert found.model_id == "mlx-community--Tiny"
        assert found.folder == folder / "snapshots" / "aaa"
        assert "older builds" in found.warnings[0]


def test_drafter_is_an_absolute_real_path(tmp_path, monkeypatch):
    real = make_folder(tmp_path / "real", DRAFTER_CONFIG)
    (tmp_path / "link").symlink_to(real)
    monkeypatch.chdir(tmp_path)
    assert find_drafter("link") == real
    folder = hub(tmp_path, "models--z-lab--D", DRAFTER_CONFIG)
    assert find_drafter(str(folder)) == folder / "snapshots" / "aaa"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(FileNotFoundError, match="hf download z-lab/Other"):
        find_drafter("z-lab/Other")
    for bare in ("Qwen3.8-27B-DFlash2", "no/such/folder"):
        with pytest.raises(FileNotFoundError, match="drafter: found"):
            find_drafter(bare)


def test_listening_server():
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert server_answers(url)
    assert not server_answers(url)
    with pytest.raises(ValueError, match="url: found"):
        server_answers("127.0.0.1:8000")


# Do they fit


def pair(tmp_path, target=TARGET_CONFIG, drafter=DRAFTER_CONFIG, weights=("fc.weight",)):
    return check_pair(
        make_folder(tmp_path / "t", target), make_folder(tmp_path / "d", drafter, weights)
    )


def changed(config, **values):
    return {**config, **values}


def nested(**values):
    return changed(DRAFTER_CONFIG, dflash_config=DRAFTER_CONFIG["dflash_config"] | values)


def test_fitting_pair(tmp_path):
    found = pair(tmp_path)
    assert (found.block_size, found.target_quantized, found.drafter_quantized) == (8, True, False)


@pytest.mark.parametrize(
    "kwargs, words",
    [
        (
            {"target": changed(TARGET_CONFIG, model_type="llama")},
            "target model_type: found 'llama'",
        ),
        ({"target": DRAFTER_CONFIG}, "target: found the drafter"),
        ({"target": {"hidden_size": 64}}, "target model_type: found None"),
        ({"target": {"model_type": "qwen3"}}, "hidden_size"),
        ({"drafter": changed(DRAFTER_CONFIG, architectures=["DFlashDraftModel"])}, "architectures"),
        ({"drafter": changed(DRAFTER_CONFIG, hidden_size=96)}, "hidden_size"),
        ({"drafter": changed(DRAFTER_CONFIG, num_target_layers=9)}, "num_target_layers"),
        ({"drafter": nested(target_layer_ids=[1, 4, 9])}, "target_layer_ids"),
        ({"drafter": nested(mask_token_id=None)}, "mask_token_id"),
        ({"drafter": nested(block_size=0)}, "block_size"),
        ({"weights": ("fc.weight", "lm_head.weight")}, "'lm_head.weight'"),
        ({"weights": ("fc.weight", "model.embed_tokens.weight")}, "embed_tokens"),
    ],
)
def test_pairs_that_do_not_fit(tmp_path, kwargs, words):
    with pytest.raises(ValueError) as error:
        pair(tmp_path, **kwargs)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_quantisation_that_oMLX_could_not_do(tmp_path):
    found = pair(tmp_path)
    entry = {"dflash_draft_quant_enabled": True}
    check_quant(entry, found)
    with pytest.raises(ValueError, match="group_size: found 128, allowed: a divisor"):
        check_quant(entry | {"dflash_draft_quant_group_size": 128}, found)
    odd = replace(found, drafter_rows=(96,))
    with pytest.raises(ValueError, match="group_size: found 64, allowed: a divisor"):
        check_quant(entry | {"dflash_draft_quant_group_size": None}, odd)
    # What is no size at all is reported as a bad value, not here.
    for value in ("64", 64.5, True, 0, -1, [64]):
        check_quant(entry | {"dflash_draft_quant_group_size": value}, odd)
    stored = changed(DRAFTER_CONFIG, quantization={"bits": 4, "group_size": 64})
    ready = pair(tmp_path / "stored", drafter=stored)
    with pytest.raises(ValueError, match="quantised already"):
        check_quant(entry, ready)
    check_quant({"dflash_draft_quant_enabled": False}, ready)


def test_incomplete_folders(tmp_path):
    pair(tmp_path)
    target, drafter = tmp_path / "t", tmp_path / "d"
    weights = drafter / "model.safetensors"
    raw = weights.read_bytes()
    weights.write_bytes(raw[:-4])
    with pytest.raises(ValueError, match="truncated"):
        check_pair(target, drafter)
    weights.unlink()
    with pytest.raises(FileNotFoundError):
        check_pair(target, drafter)
    for name in ("a", "b"):
        (drafter / f"{name}.safetensors").write_bytes(raw)
    index = {"weight_map": {"x": "a.safetensors", "y": "c.safetensors"}}
    (drafter / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FileNotFoundError, match=r"c\.safetensors"):
        check_pair(target, drafter)
    (drafter / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        check_pair(target, drafter)


@pytest.mark.parametrize("layout", ["hub", "local-dir"])
def test_known_hashes_are_checked(tmp_path, layout):
    folder = make_folder(tmp_path / "snapshots" / "aaa", DRAFTER_CONFIG)
    weights = folder / "model.safetensors"
    raw = weights.read_bytes()
    published = hashlib.sha256(raw).hexdigest()
    if layout == "hub":
        (tmp_path / "blobs").mkdir()
        weights.rename(tmp_path / "blobs" / published)
        weights.symlink_to(tmp_path / "blobs" / published)
    else:
        note = folder / ".cache" / "huggingface" / "download" / "model.safetensors.metadata"
        note.parent.mkdir(parents=True)
        note.write_text(f"commit\n{published}\n123.4\n")
    check_weights(folder)
    weights.write_bytes(raw[:-1] + b"\xff")
    with pytest.raises(ValueError, match=r"sha256 .* download it again"):
        check_weights(folder)
