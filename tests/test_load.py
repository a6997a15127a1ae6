"""Folders, names and hub caches that drafters and targets are loaded from."""

import json
import shutil
import socket
import warnings

import mlx.core as mx
import mlx_lm
import pytest
from drafters import V1, V2, block_of, random_weights, without, write_config, write_drafter
from folders import LOADABLE, REFUSED, publish, refused, sharded
from mlx.utils import tree_flatten
from tiny import CONFIGS, make_model

from mlx_dflash2.load import is_drafter, load, load_drafter, read_drafter_args

MUSE = V1 | dict(architectures=["MuseGlimmerAssistantModel"])


def same(first, second) -> bool:
    pairs = zip(tree_flatten(first.parameters()), tree_flatten(second.parameters()), strict=True)
    return all(a[0] == b[0] and mx.array_equal(a[1], b[1]).item() for a, b in pairs)


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


# --- folders of a drafter


@pytest.mark.parametrize("state", LOADABLE)
def test_folder_loads(state, tmp_path):
    mx.random.seed(3)
    LOADABLE[state](tmp_path / "drafter")
    mx.random.seed(3)
    expected = load_drafter(write_drafter(tmp_path / "plain"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same(load_drafter(tmp_path / "drafter"), expected)


@pytest.mark.parametrize("state", REFUSED)
def test_folder_is_refused(state, tmp_path):
    make, error, parts = REFUSED[state]
    make(tmp_path / "drafter")
    message = refused(error, load_drafter, tmp_path / "drafter")
    assert all(part in message for part in [*parts, "drafter"])


def test_an_index_of_another_sharding_is_ignored_with_one_warning(tmp_path):
    shards = sharded(tmp_path / "stale")
    (tmp_path / "stale" / "extra").mkdir()
    for i, shard in enumerate(shards):
        (tmp_path / "stale" / shard).rename(tmp_path / "stale" / f"model-{i}.safetensors")
    with pytest.warns(UserWarning, match="model-00001-of-00003") as caught:
        drafter = load_drafter(tmp_path / "stale")
    assert len(caught) == 1 and caught[0].filename == __file__
    assert mx.isfinite(block_of(drafter)).all().item()


def test_paths_may_start_in_the_home_folder(tmp_path, monkeypatch, target_folder):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_drafter(tmp_path / "drafter")
    assert load_drafter("~/drafter").block_size == 8
    shutil.copytree(target_folder, tmp_path / "target")
    assert len(load("~/target")[0].layers) == 3


# --- spellings and mismatches of tensors


def renamed(weights: dict, *changes: tuple[str, str]) -> dict:
    for old, new in changes:
        weights = {name.replace(old, new): value for name, value in weights.items()}
    return weights


def prefixed(weights: dict) -> dict:
    return {f"model.{name}": value for name, value in weights.items()}


@pytest.mark.parametrize(
    "config, spell",
    [
        (V2, prefixed),
        (V2, lambda w: renamed(w, ("_codebook", "_codebook.weight"))),
        (V2, lambda w: prefixed(renamed(w, ("r_codebook", "r_codebook.weight")))),
        (
            MUSE,
            lambda w: renamed(
                w, ("hidden_norm.", "encoder.output_norm_enc."), ("layers.0.", "midlayer.")
            ),
        ),
        (MUSE, lambda w: {f"encoder.{n}" if n.startswith("fc.") else n: w[n] for n in w}),
    ],
    ids=["model. prefix", "codebook.weight", "both", "muse norm and layer", "muse fc"],
)
def test_accepted_spellings(config, spell, tmp_path):
    weights = random_weights(config)
    expected = load_drafter(write_drafter(tmp_path / "plain", config, weights))
    assert same(load_drafter(write_drafter(tmp_path / "spelled", config, spell(weights))), expected)


def plus(name: str, value: mx.array | None = None):
    return lambda w: w | {name: mx.zeros((4, 4)) if value is None else value}


CODEBOOK = "candidate_selector.predecessor_codebook"
QKV = "layers.0.self_attn.qkv_proj.weight"


@pytest.mark.parametrize(
    "config, change, parts",
    [
        (V2, lambda w: without(w, "fc.weight"), ["`fc.weight` is missing"]),
        (V2, lambda w: without(w, CODEBOOK), [f"`{CODEBOOK}.weight` is missing"]),
        (
            V2,
            lambda w: {n: w[n] for n in w if "selector" not in n},
            ["`candidate_selector.", "is missing, and 2 more"],
        ),
        (V2, lambda w: {n: w[n] for n in w if "_conv" not in n}, ["_conv", "and 7 more"]),
        (V2 | dict(num_hidden_layers=1, layer_types=None), dict, ["`layers.1.", "is unexpected"]),
        (V2 | dict(num_hidden_layers=3, layer_types=None), dict, ["`layers.2.", "is missing"]),
        (V1, dict, ["`candidate_selector.", "is unexpected"]),
        (V2, plus("mask_embedding"), ["`mask_embedding` is unexpected"]),
        (V2, plus(f"{CODEBOOK}.weight"), [f"`{CODEBOOK}.weight`", "two spellings"]),
        (V2, plus("model.fc.weight"), ["`fc.weight`", "two spellings"]),
        (V2, plus(QKV), [f"`{QKV}` is fused"]),
        (V2, plus("lm_head.weight"), ["`lm_head.weight`", "vocabulary"]),
        (V2, plus("model.embed_tokens.weight"), ["`embed_tokens.weight`", "vocabulary"]),
        (V2, plus("d2t"), ["`d2t`", "vocabulary"]),
        (V2 | dict(intermediate_size=96), dict, ["`layers.0.mlp.", "96", "128"]),
        (V2, plus("fc.weight", mx.zeros((128, 64))), ["`fc.weight`", "[128, 64]", "[64, 128]"]),
        (V2, plus("fc.weight", mx.zeros((64, 16), mx.uint32)), ["`fc.weight`", "U32", "scales"]),
        (V2, plus("fc.weight", mx.zeros((64, 16), mx.int32)), ["`fc.weight`", "I32", "scales"]),
        (V2, plus("fc.weight", mx.zeros((64, 128), mx.uint8)), ["`fc.weight`", "U8", "scales"]),
        (V2, plus("fc.qweight", mx.zeros((16, 64), mx.int32)), ["`fc.qweight`", "I32"]),
        (V2, plus("fc.weight_packed", mx.zeros((4, 4), mx.int32)), ["`fc.weight_packed`"]),
        (
            V2,
            plus("layers.0.attention_conv.base_kernel", mx.zeros((2, 2, 64), mx.int32)),
            ["base_kernel", "I32", "BF16"],
        ),
        (V2, plus("fc.scales"), ["`quantization` is missing", "`fc`"]),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_tensors_that_do_not_match_the_config(config, change, parts, tmp_path):
    write_drafter(tmp_path / "drafter", V2, change(random_weights(V2)))
    write_config(tmp_path / "drafter", config)
    message = refused(ValueError, load_drafter, tmp_path / "drafter")
    assert all(part in message for part in parts)


# --- the wrong model for an argument


def test_a_drafter_is_no_target(tmp_path):
    message = refused(ValueError, load, str(write_drafter(tmp_path / "d")))
    assert "given as the model, is a drafter" in message and "as the draft model" in message


@pytest.mark.parametrize(
    "config, named",
    [
        (dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3"), "Qwen3ForCausalLM"),
        (dict(model_type="qwen3_5_mtp"), "qwen3_5_mtp"),
        ({}, "no known kind"),
    ],
    ids=["language model", "other head", "empty config"],
)
def test_a_language_model_is_no_drafter(config, named, tmp_path):
    folder = write_drafter(tmp_path / "lm", V2)
    write_config(folder, config)
    for call in (load_drafter, read_drafter_args):
        message = refused(ValueError, call, folder)
        assert named in message and "given as the draft model" in message
    assert not is_drafter(config)


def test_other_drafters_are_no_targets_either(tmp_path):
    for i, config in enumerate(({"speculators_model_type": "eagle3"}, {"dflash_config": {}})):
        assert is_drafter(config)
        assert "is a drafter" in refused(ValueError, load, write_config(tmp_path / str(i), config))


# --- targets


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
    publish(offline_hub, "z-lab/tiny-DFlash2", write_drafter(tmp_path / "drafter"))
    publish(offline_hub, "org/tiny", target_folder)
    assert same(load_drafter("z-lab/tiny-DFlash2"), load_drafter(tmp_path / "drafter"))
    assert read_drafter_args("z-lab/tiny-DFlash2").block_size == 8
    model, tokenizer = load("org/tiny")
    assert same(model, mlx_lm.load(str(target_folder))[0])
    assert 7 in tokenizer.eos_token_ids


def test_cached_repositories_are_told_apart_offline(offline_hub, tmp_path, target_folder):
    publish(offline_hub, "z-lab/tiny-DFlash2", write_drafter(tmp_path / "drafter"))
    publish(offline_hub, "org/tiny", target_folder)
    assert "as the draft model" in refused(ValueError, load, "z-lab/tiny-DFlash2")
    assert "given as the draft model" in refused(ValueError, load_drafter, "org/tiny")


def test_a_cached_repository_with_a_lost_blob_is_incomplete(offline_hub, tmp_path, target_folder):
    for repo, folder, call in (
        ("z-lab/tiny-DFlash2", write_drafter(tmp_path / "drafter"), load_drafter),
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
    publish(offline_hub, "z-lab/tiny-DFlash2", write_drafter(tmp_path / "drafter"))
    message = refused(FileNotFoundError, load_drafter, "z-lab/tiny-DFlash2", revision="other")
    assert "z-lab/tiny-DFlash2" in message


def test_nothing_but_the_config_is_downloaded_before_a_refusal(
    monkeypatch, tmp_path, target_folder
):
    asked = []

    def download(repo, revision=None, allow_patterns=None):
        asked.append((repo, revision, allow_patterns))
        return str(folders[repo])

    folders = {"z-lab/drafter": write_drafter(tmp_path / "drafter"), "org/target": target_folder}
    monkeypatch.setattr("mlx_dflash2.checkpoint.snapshot_download", download)
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
