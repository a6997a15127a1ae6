"""Folders that drafters are loaded from, and the tensors in them."""

import warnings

import mlx.core as mx
import pytest
from support.drafters import V1, V2, block_of, random_weights, without
from support.folders import LOADABLE, REFUSED, refused, same, sharded
from support.saved_models import save_drafter, write_config
from support.tiny import drafter_config

from mlx_dflash2.checkpoint.load import (
    bits_at_load,
    check_bits,
    find_drafter,
    is_drafter,
    load_drafter,
    read_drafter_args,
)
from mlx_dflash2.checkpoint.target import load

MUSE = V1 | dict(architectures=["MuseGlimmerAssistantModel"])


# --- folders of a drafter


@pytest.mark.parametrize("state", LOADABLE)
def test_folder_loads(state, tmp_path):
    mx.random.seed(3)
    LOADABLE[state](tmp_path / "drafter")
    mx.random.seed(3)
    expected = load_drafter(save_drafter(tmp_path / "plain"))
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


def test_paths_may_start_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    save_drafter(tmp_path / "drafter")
    assert load_drafter("~/drafter").block_size == 8


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
    expected = load_drafter(save_drafter(tmp_path / "plain", config, weights))
    assert same(load_drafter(save_drafter(tmp_path / "spelled", config, spell(weights))), expected)


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
    save_drafter(tmp_path / "drafter", V2, change(random_weights(V2)))
    write_config(tmp_path / "drafter", config)
    message = refused(ValueError, load_drafter, tmp_path / "drafter")
    assert all(part in message for part in parts)


# --- the wrong model for an argument


def test_a_drafter_is_no_target(tmp_path):
    message = refused(ValueError, load, str(save_drafter(tmp_path / "d")))
    assert "given as the model, is a drafter" in message and "as the draft model" in message


@pytest.mark.parametrize(
    "config, named",
    [
        (dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3"), "Qwen3ForCausalLM"),
        (dict(model_type="qwen3_5_mtp"), "qwen3_5_mtp"),
        ({}, "unknown kind"),
    ],
    ids=["language model", "other head", "empty config"],
)
def test_a_language_model_is_no_drafter(config, named, tmp_path):
    folder = save_drafter(tmp_path / "lm", V2)
    write_config(folder, config)
    for call in (load_drafter, read_drafter_args):
        message = refused(ValueError, call, folder)
        assert named in message and "given as the draft model" in message
    assert not is_drafter(config)


def test_other_drafters_are_no_targets_either(tmp_path):
    for i, config in enumerate(({"speculators_model_type": "eagle3"}, {"dflash_config": {}})):
        assert is_drafter(config)
        assert "is a drafter" in refused(ValueError, load, write_config(tmp_path / str(i), config))


@pytest.mark.parametrize(
    "device, bits, stored, expected",
    [
        ("gpu", None, None, 4), ("gpu", 16, None, None), ("gpu", 8, None, 8),
        ("gpu", None, {"bits": 8}, None), ("cpu", None, None, None), ("cpu", 16, None, None),
        ("cpu", 4, None, 4),
    ],
)  # fmt: skip
def test_a_gpu_quantizes_the_drafter_unless_told_otherwise(
    device, bits, stored, expected, tmp_path, monkeypatch
):
    folder = save_drafter(tmp_path / "drafter", drafter_config())
    source = find_drafter(folder)
    source.args.quantization = stored
    monkeypatch.setattr(mx, "default_device", lambda: getattr(mx, device))
    assert bits_at_load(bits, source) == expected
    check_bits(16, source)


def test_the_default_reaches_the_loaded_drafter(tmp_path, monkeypatch):
    folder = save_drafter(tmp_path / "drafter", drafter_config())
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    assert "scales" in load_drafter(folder).layers[0].mlp.up_proj
    assert "scales" not in load_drafter(folder, bits=16).layers[0].mlp.up_proj
