"""Targets, and what of the hub's cache is loaded without a network."""

import json
import shutil
import socket

import mlx.core as mx
import mlx_lm
import pytest
from mlx.utils import tree_flatten
from support.folders import REFUSED, publish, refused, same
from support.saved_models import save_drafter, write_config
from support.tiny import CONFIGS, make_model

from mlx_dflash2.checkpoint.load import load_drafter, read_drafter_args
from mlx_dflash2.checkpoint.target import load


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    """A tiny target with a tokenizer, whose end ids are spread over its files."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("target") / "model"
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "eos_token_id": [5, 6]}
    write_config(folder, config | CONFIGS["qwen3"])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7]}))
    weights = dict(tree_flatten(make_model("qwen3").parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    vocabulary = {f"t{i}": i for i in range(512)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="t9").save_pretrained(folder)
    return folder


@pytest.fixture
def offline_hub(tmp_path, monkeypatch):
    """An empty cache of the hub, with neither its consent nor a socket to reach it."""

    def blocked(*_, **__):
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", blocked)
    monkeypatch.setattr(socket, "getaddrinfo", blocked)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


# --- targets


def test_a_target_in_the_home_folder(tmp_path, monkeypatch, target_folder):
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copytree(target_folder, tmp_path / "target")
    assert len(load("~/target")[0].layers) == CONFIGS["qwen3"]["num_hidden_layers"]


def test_targets_load_as_with_mlx_lm(target_folder):
    (model, tokenizer), (plain, plain_tokenizer) = load(target_folder), mlx_lm.load(target_folder)
    assert same(model, plain)
    assert set(plain_tokenizer.eos_token_ids) == {7, 9}
    assert set(tokenizer.eos_token_ids) == {5, 6, 7, 9}
    *_, config = load(str(target_folder), return_config=True, lazy=True)
    assert config["model_type"] == "qwen3"


@pytest.mark.parametrize(
    "config_ids, generation_ids, expected",
    [
        (None, None, {9}),
        (3, None, {3, 9}),
        (3, [4], {3, 4, 9}),
        ([9, 3], 4, {3, 4, 9}),
    ],
)
@pytest.mark.parametrize("nested", [False, True], ids=["flat", "text_config"])
def test_stop_ids_are_those_of_all_files(
    config_ids, generation_ids, expected, nested, target_folder, tmp_path
):
    folder = shutil.copytree(target_folder, tmp_path / "target")
    config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": None}
    ids = {"eos_token_id": config_ids}
    write_config(folder, config | ({"text_config": ids} if nested else ids))
    generation = {} if generation_ids is None else {"eos_token_id": generation_ids}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    _, tokenizer = load(folder)
    assert set(tokenizer.eos_token_ids) == expected


@pytest.mark.parametrize("state", ["truncated", "shard missing", "only config", "empty", "a file"])
def test_damaged_targets_are_refused(state, target_folder, tmp_path):
    make, error, parts = REFUSED[state]
    make(tmp_path / "target")
    if (tmp_path / "target" / "config.json").exists():
        shutil.copy(target_folder / "config.json", tmp_path / "target")
    message = refused(error, load, tmp_path / "target")
    assert all(part in message for part in parts)


# --- the hub's cache


def test_cached_repositories_load_offline(offline_hub, tmp_path, target_folder):
    publish(offline_hub, "z-lab/tiny-DFlash2", save_drafter(tmp_path / "drafter"))
    publish(offline_hub, "org/tiny", target_folder)
    assert same(load_drafter("z-lab/tiny-DFlash2"), load_drafter(tmp_path / "drafter"))
    assert read_drafter_args("z-lab/tiny-DFlash2").block_size == 8
    model, tokenizer = load("org/tiny")
    assert same(model, mlx_lm.load(str(target_folder))[0])
    assert 7 in tokenizer.eos_token_ids


def test_cached_repositories_are_told_apart_offline(offline_hub, tmp_path, target_folder):
    publish(offline_hub, "z-lab/tiny-DFlash2", save_drafter(tmp_path / "drafter"))
    publish(offline_hub, "org/tiny", target_folder)
    assert "as the draft model" in refused(ValueError, load, "z-lab/tiny-DFlash2")
    assert "given as the draft model" in refused(ValueError, load_drafter, "org/tiny")


def test_a_cached_repository_with_a_lost_blob_is_incomplete(offline_hub, tmp_path, target_folder):
    for repo, folder, call in (
        ("z-lab/tiny-DFlash2", save_drafter(tmp_path / "drafter"), load_drafter),
        ("org/tiny", target_folder, load),
    ):
        snapshot = publish(offline_hub, repo, folder)
        (snapshot / "model.safetensors").resolve().unlink()
        assert "Incomplete download" in refused(FileNotFoundError, call, repo)


@pytest.mark.parametrize("offline", [True, False], ids=["HF_HUB_OFFLINE", "no network"])
@pytest.mark.parametrize("name", ["org/absent", "no/such/folder", "/no/such/folder", "", "a b"])
def test_what_is_nowhere_is_refused(name, offline, offline_hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    for call in (load, load_drafter, read_drafter_args):
        message = refused(FileNotFoundError, call, name)
        assert repr(name) in message and "neither a local folder" in message


def test_a_revision_that_is_not_cached_is_refused(offline_hub, tmp_path):
    publish(offline_hub, "z-lab/tiny-DFlash2", save_drafter(tmp_path / "drafter"))
    message = refused(FileNotFoundError, load_drafter, "z-lab/tiny-DFlash2", revision="other")
    assert "z-lab/tiny-DFlash2" in message


def test_nothing_but_the_config_is_downloaded_before_a_refusal(
    monkeypatch, tmp_path, target_folder
):
    asked = []

    def download(repo, revision=None, allow_patterns=None):
        asked.append((repo, revision, allow_patterns))
        return str(folders[repo])

    folders = {"z-lab/drafter": save_drafter(tmp_path / "drafter"), "org/target": target_folder}
    monkeypatch.setattr("mlx_dflash2.checkpoint.files.snapshot_download", download)
    for call, repo in ((load, "z-lab/drafter"), (load_drafter, "org/target")):
        refused(ValueError, call, repo)
    read_drafter_args("z-lab/drafter", revision="r1")
    assert [patterns for *_, patterns in asked] == [["config.json"]] * 3
    assert asked[-1][1] == "r1"
    asked.clear()
    load_drafter("z-lab/drafter", revision="r2")
    load("org/target", revision="r3")
    whole = [patterns for _, _, patterns in asked if patterns != ["config.json"]]
    assert whole == [["*.json", "*.safetensors"], mlx_lm.utils.DEFAULT_ALLOW_PATTERNS]
    assert {revision for _, revision, _ in asked} == {"r2", "r3"}
