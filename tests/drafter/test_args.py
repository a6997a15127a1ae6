"""A drafter's config: every field, place, default and refusal."""

import json
from pathlib import Path

import pytest
from support.drafters import (
    FULL,
    SHAPE,
    SLIDING,
    V1,
    V2,
    V2_FIELDS,
    nested,
    read_config,
    refused_config,
    without,
)

from mlx_dflash2.drafter.args import default_target_layer_ids

INF, NAN = float("inf"), float("nan")


def test_published_layouts():
    args = read_config(V2)
    assert (args.generation, args.has_conv, args.has_selector) == (2, True, True)
    assert (args.block_size, args.target_layer_ids, args.mask_token_id) == (8, [1, 3], 501)
    assert (args.causal, args.context_size, args.sliding_window) == ([False] * 2, 15, 16)
    assert args.rope_parameters == [{"rope_type": "default", "rope_theta": 1e6}] * 2
    assert args.target_hidden_size == args.hidden_size
    args = read_config(V1)
    assert (args.generation, args.has_conv, args.has_selector) == (1, False, False)
    assert (args.block_size, args.layer_types, args.context_size) == (16, [FULL] * 2, None)


@pytest.mark.parametrize("name", ["DFlashDraftModel", "Qwen3DFlashDraftModel"])
@pytest.mark.parametrize("as_list", [True, False], ids=["list", "string"])
def test_dflash_1_architectures(name, as_list):
    assert read_config(V1 | dict(architectures=[name] if as_list else name)).generation == 1


def test_muse_assistant_leaves_out_vocabulary_and_causality():
    config = V1 | dict(architectures=["MuseGlimmerAssistantModel"], vocab_size=None)
    args = read_config(config | dict(layer_types=[SLIDING, FULL], sliding_window=16))
    assert (args.generation, args.vocab_size, args.causal) == (1, 202048, [False, False])
    assert read_config(config | dict(vocab_size=512, is_causal=True)).vocab_size == 512


def test_names_and_settings_of_other_tools_are_ignored():
    extra = dict(
        auto_map={"AutoModel": "evil.py"}, dtype="float16", transformers_version="9",
        eos_token_id=[1, 2], tie_word_embeddings=True, use_cache=True, attention_dropout=0.5,
        initializer_range=1.0, use_sliding_window=False, max_window_layers=1,
    )  # fmt: skip
    assert read_config(V2 | extra) == read_config(V2)


# --- places and defaults


@pytest.mark.parametrize(
    "top, inner, expected",
    [(8, None, 8), (None, 8, 8), (8, 8, 8), (16, 8, 8), (None, None, 16)],
    ids=["top", "nested", "both", "nested wins", "default"],
)
def test_block_size_in_either_place(top, inner, expected):
    assert read_config(nested(block_size=inner) | dict(block_size=top)).block_size == expected


@pytest.mark.parametrize("name", sorted(V2_FIELDS))
def test_dflash_fields_in_either_place(name):
    flat = V2 | V2_FIELDS | dict(dflash_config=None)
    assert read_config(flat) == read_config(V2)
    moved = V2 | {"dflash_config": without(V2_FIELDS, name), name: V2_FIELDS[name]}
    assert read_config(moved) == read_config(V2)


@pytest.mark.parametrize(
    "name, value, expected",
    [
        ("conv_kernel_size", None, 0),
        ("conv_group_size", None, 16),
        ("selector_vocab_size", None, None),
        ("selector_vocab_size", 500, 500),
        ("input_embedding_scale", None, 1.0),
        ("input_embedding_scale", 8, 8.0),
        ("output_multiplier", None, 1.0),
        ("output_multiplier", 0.196, 0.196),
        ("final_logit_softcapping", None, None),
        ("final_logit_softcapping", 0, None),
        ("final_logit_softcapping", -1.5, None),
        ("final_logit_softcapping", 20, 20.0),
    ],
)
def test_optional_fields(name, value, expected):
    assert getattr(read_config(nested(**{name: value})), name) == expected
    assert getattr(read_config(nested(**{name: None}) | {name: value}), name) == expected


def test_taps_default_to_the_trainers_formula():
    config = V1 | dict(dflash_config=dict(mask_token_id=1), num_hidden_layers=5)
    assert read_config(config | dict(num_target_layers=36)).target_layer_ids == [1, 9, 17, 25, 33]
    assert default_target_layer_ids(5, 64) == [1, 16, 31, 46, 61]
    assert default_target_layer_ids(5, 52) == [1, 13, 25, 37, 49]
    assert default_target_layer_ids(1, 36) == [18]


@pytest.mark.parametrize("ids", [[3], [0, 1, 2, 3, 5], [1, 3]])
def test_taps_need_not_be_as_many_as_layers(ids):
    args = read_config(nested(target_layer_ids=ids) | dict(num_target_layers=None))
    assert (args.target_layer_ids, args.num_target_layers) == (ids, ids[-1] + 1)
    assert not args.num_target_layers_declared


# --- causality, layers, windows


@pytest.mark.parametrize(
    "top, inner, expected",
    [
        (dict(is_causal=True), dict(causal=False), [True, True]),
        (dict(is_causal=False), dict(causal=True), [False, False]),
        (dict(is_causal=None), dict(causal=True), [True, True]),
        ({}, dict(causal=False), [False, False]),
        (dict(dflash_query_causal=True), dict(causal=False), [False, False]),
        (dict(dflash_query_causal=False), {}, [False, False]),
        ({}, dict(is_causal=False), [False, False]),
        ({}, {}, [True, False]),
    ],
    ids=["top", "top false", "null", "nested", "nested first", "query", "nested name", "legacy"],
)
def test_causality(top, inner, expected):
    config = without(nested(**inner), "is_causal") | dict(layer_types=[SLIDING, FULL]) | top
    assert read_config(config).causal == expected


def test_use_swa_makes_all_layers_slide_and_see_the_whole_block():
    config = without(nested(use_swa=True, swa_window_size=32), "layer_types", "sliding_window")
    args = read_config(without(config, "is_causal"))
    assert (args.layer_types, args.sliding_window) == ([SLIDING] * 2, 32)
    assert (args.causal, args.context_size) == ([False] * 2, 31)
    assert read_config(config | dict(layer_types=[FULL] * 2)).layer_types == [FULL] * 2


def test_a_window_without_sliding_layers_is_not_used():
    args = read_config(without(V2, "layer_types"))
    assert (args.layer_types, args.sliding_window, args.context_size) == ([FULL] * 2, None, None)


@pytest.mark.parametrize("name", ["rope_is_neox_style", "is_neox_style"])
def test_rope_pairing(name):
    assert not read_config(V2).rope_traditional
    assert read_config(V2 | {name: False}).rope_traditional
    assert not read_config(V2 | {name: True}).rope_traditional


# --- refusals


@pytest.mark.parametrize("name", sorted(without(SHAPE, "max_position_embeddings")))
@pytest.mark.parametrize("found", [None, True, "64", 0, -4, [64], {}, NAN, INF], ids=repr)
def test_sizes_have_to_be_given_as_numbers(name, found):
    assert f"`{name}`" in refused_config(V2 | {name: found})
    if found is None:
        assert f"`{name}`" in refused_config(without(V2, name))


@pytest.mark.parametrize("name", sorted(without(SHAPE, "rms_norm_eps")))
@pytest.mark.parametrize("found", [64.0, 2**40], ids=repr)
def test_sizes_have_to_be_plausible_integers(name, found):
    assert f"`{name}`" in refused_config(V2 | {name: found})


@pytest.mark.parametrize(
    "name, found",
    [
        *(("block_size", found) for found in (1, 0, -1, "8", True, 8.0, 10**9)),
        *(("mask_token_id", found) for found in (None, -1, "1", True, 1.5)),
        *(("target_layer_ids", found) for found in ([], [3, 1], [1, 1], [-1, 2], [1, 6], 3)),
        *(("target_layer_ids", found) for found in (["1"], [True], [1.0], [None], "13", {})),
        *(("num_target_layers", found) for found in (0, "6", True, 2.5)),
        *(("conv_kernel_size", found) for found in (-1, "2", True, 10**6)),
        *(("conv_group_size", found) for found in (0, 7, -16, "16", 128)),
        *(("selector_rank", found) for found in (None, 0, -1, "32", True)),
        *(("selector_top_k", found) for found in (None, 0, -1, 513, "8")),
        *(("selector_vocab_size", found) for found in (0, 513, "500", True)),
        *(("input_embedding_scale", found) for found in (0, -1, "1", True, NAN)),
        *(("output_multiplier", found) for found in (0, -1, "1", True, INF)),
        *(("final_logit_softcapping", found) for found in ("20", True, NAN, [20])),
        *(("target_hidden_size", found) for found in (0, "64", True)),
        *(("use_swa", found) for found in ("true", 1)),
        *(("projector_type", found) for found in ("dspark", "domino")),
        ("markov_rank", 64),
        ("sample_from_anchor", True),
        ("attention_sink_bias", True),
        ("attention_value_scale", 0.5),
        ("backbone_rotary_base", 1e6),
        ("partial_rotary_factor", 0.25),
        ("draft_vocab_size", 256),
    ],
    ids=lambda value: repr(value),
)
def test_dflash_fields_refused_config(name, found):
    assert f"`{name}`" in refused_config(nested(**{name: found}) | {name: None})
    assert f"`{name}`" in refused_config(nested(**{name: None}) | {name: found})


@pytest.mark.parametrize(
    "name, found",
    [
        *(("architectures", found) for found in (None, [], ["Qwen3ForCausalLM"], 3, [3])),
        ("architectures", ["DFlashLagunaForCausalLM"]),
        ("architectures", ["DSparkDraftModel"]),
        *(("dflash_config", found) for found in ([], "x", 3, True)),
        *(("layer_types", found) for found in ([SLIDING], [SLIDING] * 3, ["x"] * 2, "s", [[], []])),
        *(("sliding_window", found) for found in (None, 0, 1, -16, "16", True, 16.0)),
        *(("is_causal", found) for found in ("false", 0, 1, [])),
        *(("dflash_query_causal", found) for found in ("false", 1)),
        *(("rope_is_neox_style", found) for found in ("true", 1)),
        ("num_key_value_heads", 3),
        ("head_dim", 31),
        ("head_dim", 2),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("hidden_act", "gelu"),
        *(("max_position_embeddings", found) for found in (0, "4096", True)),
        *(("quantization", found) for found in ("4bit", 4, [])),
    ],
    ids=lambda value: repr(value),
)
def test_top_level_fields_refused_config(name, found):
    config = V2 if name != "dflash_query_causal" else without(V2, "is_causal")
    message = refused_config(config | {name: found})
    assert f"`{name}`" in message
    assert found is None or repr(found) in message


@pytest.mark.parametrize("section", ["quantization_config", "compression_config", "quantization"])
@pytest.mark.parametrize("method", ["awq", "gptq", "compressed-tensors", "fp8", "bitsandbytes"])
def test_other_quantisation_formats_are_refused_by_name(section, method):
    message = refused_config(V2 | {section: {"quant_method": method, "bits": 4, "group_size": 128}})
    assert method in message and "quant_method" in message


@pytest.mark.parametrize("field", ["selector_rank", "conv_kernel_size"])
def test_dflash_1_has_neither_selector_nor_convolution(field):
    assert f"`{field}` is 2" in refused_config(V1 | {field: 2})


def test_taps_or_depth_have_to_be_given():
    config = nested(target_layer_ids=None) | dict(num_target_layers=None)
    assert "`target_layer_ids`" in refused_config(config)


def test_the_embedded_drafter_is_read_config():
    assets = Path(__file__).parents[2] / "mlx_dflash2" / "embedded"
    for config in assets.glob("*/config.json"):
        assert read_config(json.loads(config.read_text())).generation == 2
