"""A drafter's config: every field, place, default and refusal."""

import json
from pathlib import Path

import pytest
from drafters import FULL, SHAPE, SLIDING, SPECULATORS, V1, V2, V2_FIELDS, nested, without

from mlx_dflash2.drafter_args import DrafterArgs, default_target_layer_ids

INF, NAN = float("inf"), float("nan")


def read(config: dict) -> DrafterArgs:
    return DrafterArgs.from_dict(json.loads(json.dumps(config)))


def refused(config: dict) -> str:
    with pytest.raises(ValueError) as error:
        DrafterArgs.from_dict(config)
    message = str(error.value)
    assert "\n" not in message and message.startswith("Drafter config: `")
    return message


def test_published_layouts():
    args = read(V2)
    assert (args.generation, args.has_conv, args.has_selector) == (2, True, True)
    assert (args.block_size, args.target_layer_ids, args.mask_token_id) == (8, [1, 3], 501)
    assert (args.causal, args.context_size, args.sliding_window) == ([False] * 2, 15, 16)
    assert args.rope_parameters == [{"rope_type": "default", "rope_theta": 1e6}] * 2
    assert args.target_hidden_size == args.hidden_size
    args = read(V1)
    assert (args.generation, args.has_conv, args.has_selector) == (1, False, False)
    assert (args.block_size, args.layer_types, args.context_size) == (16, [FULL] * 2, None)


@pytest.mark.parametrize("name", ["DFlashDraftModel", "Qwen3DFlashDraftModel"])
@pytest.mark.parametrize("as_list", [True, False], ids=["list", "string"])
def test_dflash_1_architectures(name, as_list):
    assert read(V1 | dict(architectures=[name] if as_list else name)).generation == 1


def test_muse_assistant_leaves_out_vocabulary_and_causality():
    config = V1 | dict(architectures=["MuseGlimmerAssistantModel"], vocab_size=None)
    args = read(config | dict(layer_types=[SLIDING, FULL], sliding_window=16))
    assert (args.generation, args.vocab_size, args.causal) == (1, 202048, [False, False])
    assert read(config | dict(vocab_size=512, is_causal=True)).vocab_size == 512


def test_names_and_settings_of_other_tools_are_ignored():
    extra = dict(
        auto_map={"AutoModel": "evil.py"}, dtype="float16", transformers_version="9",
        eos_token_id=[1, 2], tie_word_embeddings=True, use_cache=True, attention_dropout=0.5,
        initializer_range=1.0, use_sliding_window=False, max_window_layers=1,
    )  # fmt: skip
    assert read(V2 | extra) == read(V2)


# --- places and defaults


@pytest.mark.parametrize(
    "top, inner, expected",
    [(8, None, 8), (None, 8, 8), (8, 8, 8), (16, 8, 8), (None, None, 16)],
    ids=["top", "nested", "both", "nested wins", "default"],
)
def test_block_size_in_either_place(top, inner, expected):
    assert read(nested(block_size=inner) | dict(block_size=top)).block_size == expected


@pytest.mark.parametrize("name", sorted(V2_FIELDS))
def test_dflash_fields_in_either_place(name):
    flat = V2 | V2_FIELDS | dict(dflash_config=None)
    assert read(flat) == read(V2)
    moved = V2 | {"dflash_config": without(V2_FIELDS, name), name: V2_FIELDS[name]}
    assert read(moved) == read(V2)


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
    assert getattr(read(nested(**{name: value})), name) == expected
    assert getattr(read(nested(**{name: None}) | {name: value}), name) == expected


def test_taps_default_to_the_trainers_formula():
    config = V1 | dict(dflash_config=dict(mask_token_id=1), num_hidden_layers=5)
    assert read(config | dict(num_target_layers=36)).target_layer_ids == [1, 9, 17, 25, 33]
    assert default_target_layer_ids(5, 64) == [1, 16, 31, 46, 61]
    assert default_target_layer_ids(5, 52) == [1, 13, 25, 37, 49]
    assert default_target_layer_ids(1, 36) == [18]


@pytest.mark.parametrize("ids", [[3], [0, 1, 2, 3, 5], [1, 3]])
def test_taps_need_not_be_as_many_as_layers(ids):
    args = read(nested(target_layer_ids=ids) | dict(num_target_layers=None))
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
    assert read(config).causal == expected


def test_use_swa_makes_all_layers_slide_and_see_the_whole_block():
    config = without(nested(use_swa=True, swa_window_size=32), "layer_types", "sliding_window")
    args = read(without(config, "is_causal"))
    assert (args.layer_types, args.sliding_window) == ([SLIDING] * 2, 32)
    assert (args.causal, args.context_size) == ([False] * 2, 31)
    assert read(config | dict(layer_types=[FULL] * 2)).layer_types == [FULL] * 2


def test_a_window_without_sliding_layers_is_not_used():
    args = read(without(V2, "layer_types"))
    assert (args.layer_types, args.sliding_window, args.context_size) == ([FULL] * 2, None, None)


@pytest.mark.parametrize("name", ["rope_is_neox_style", "is_neox_style"])
def test_rope_pairing(name):
    assert not read(V2).rope_traditional
    assert read(V2 | {name: False}).rope_traditional
    assert not read(V2 | {name: True}).rope_traditional


# --- rotations

ROPELESS = without(V2, "rope_parameters")
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=1024)


@pytest.mark.parametrize(
    "fields",
    [
        dict(rope_theta=1e6),
        dict(rope_parameters={"rope_theta": 1e6}),
        dict(rope_theta=1000000, rope_parameters={"rope_theta": 1e6, "type": "default"}),
        dict(rope_theta=1e6, rope_scaling=None, rope_parameters=None),
        dict(rope_theta=1e6, rope_scaling={"rope_type": None}),
        dict(rope_theta=1e6, rope_scaling={"type": "mrope", "mrope_section": [11, 11, 10]}),
        dict(rope_parameters={"rope_theta": 1e6, "mrope_section": [1], "mrope_interleaved": True}),
        dict(rope_parameters={SLIDING: {"rope_theta": 1e6}, FULL: {"rope_theta": 1e4}}),
        dict(rope_theta=1e4, rope_parameters={SLIDING: {"rope_theta": 1e6}}),
        dict(rope_theta=1e6, rope_parameters={FULL: {"rope_theta": 1e4}}),
        dict(rope_parameters={"rope_theta": 1e6, "partial_rotary_factor": 1.0}),
    ],
    ids=[
        *("flat", "nested", "both", "flat and nulls", "null type", "mrope", "mrope section"),
        *("by layer type", "layer's own first", "other type's entry", "whole head"),
    ],
)
def test_equal_rotations(fields):
    assert read(ROPELESS | fields) == read(V2)


@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
def test_yarn_in_either_place(place):
    yarn = read(ROPELESS | {"rope_theta": 1e6, place: YARN}).rope_parameters[0]
    assert yarn == YARN | dict(rope_theta=1e6)
    spelled = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": None}
    config = ROPELESS | {"rope_theta": 1e6, place: spelled}
    assert read(config).rope_parameters[0]["original_max_position_embeddings"] == 4096


def test_each_kind_of_layer_has_its_own_rotation():
    parameters = {SLIDING: {"rope_theta": 1e4}, FULL: YARN | {"rope_theta": 1e6}}
    args = read(ROPELESS | dict(layer_types=[SLIDING, FULL], rope_parameters=parameters))
    assert [rope["rope_theta"] for rope in args.rope_parameters] == [1e4, 1e6]
    assert [rope["rope_type"] for rope in args.rope_parameters] == ["default", "yarn"]


@pytest.mark.parametrize(
    "fields, named",
    [
        ({}, "rope_theta"),
        (dict(rope_parameters={"rope_type": "default"}), "rope_theta"),
        (dict(rope_theta=1e4, rope_parameters={"rope_theta": 1e6}), "rope_theta"),
        (dict(rope_theta="1e6"), "rope_theta"),
        (dict(rope_theta=True), "rope_theta"),
        (dict(rope_theta=0), "rope_theta"),
        (dict(rope_theta=-1e4), "rope_theta"),
        (dict(rope_theta=INF), "rope_theta"),
        (dict(rope_parameters={"rope_theta": "1e6"}), "rope_parameters.rope_theta"),
        (dict(rope_theta=1e6, rope_parameters=[]), "rope_parameters"),
        (dict(rope_theta=1e6, rope_parameters={SLIDING: 3}), SLIDING),
        (dict(rope_theta=1e6, rope_parameters={"rope_type": "spiral"}), "rope_type"),
        (dict(rope_theta=1e6, rope_parameters={"rope_type": ["yarn"]}), "rope_type"),
        (dict(rope_theta=1e6, rope_scaling={"type": "yarn"}), "factor"),
        (dict(rope_theta=1e6, rope_scaling={"type": "linear"}), "factor"),
        (dict(rope_theta=1e6, rope_scaling=YARN | dict(factor="4")), "factor"),
        (dict(rope_theta=1e6, rope_scaling=YARN | dict(factor=0)), "factor"),
        (dict(rope_theta=1e6, rope_scaling=YARN | dict(beta_fast=0)), "beta_fast"),
        (dict(rope_theta=1e6, rope_scaling=YARN | dict(beta_slow=1e308)), "beta_slow"),
        (dict(rope_theta=1e6, rope_scaling=YARN | dict(factor=2**70)), "factor"),
        (dict(rope_theta=10**400), "rope_theta"),
        (dict(rope_theta=1e6, rope_scaling=YARN | dict(attention_factor=2)), "attention_factor"),
        (dict(rope_theta=1e6, rope_scaling=YARN | dict(truncate=False)), "truncate"),
        (dict(rope_theta=1e6, rope_scaling={"type": "llama3", "factor": 8}), "original_max"),
        (
            dict(
                rope_theta=1e6,
                rope_scaling=YARN | dict(rope_type="llama3", low_freq_factor=4, high_freq_factor=1),
            ),
            "high_freq_factor",
        ),
        (dict(rope_theta=1e6, rope_scaling={"type": "longrope"}), "original_max"),
        (
            dict(
                rope_theta=1e6,
                rope_scaling=dict(
                    type="longrope", original_max_position_embeddings=64, short_factor=[1.0] * 3
                ),
            ),
            "short_factor",
        ),
        (dict(rope_parameters={"rope_theta": 1e6, "partial_rotary_factor": 0.5}), "partial_rot"),
        (dict(rope_parameters={"rope_theta": 1e6}, rope_scaling=YARN), "rope_scaling"),
    ],
)
def test_rotations_refused(fields, named):
    assert named in refused(ROPELESS | fields)


# --- refusals


@pytest.mark.parametrize("name", sorted(without(SHAPE, "max_position_embeddings")))
@pytest.mark.parametrize("found", [None, True, "64", 0, -4, [64], {}, NAN, INF], ids=repr)
def test_sizes_have_to_be_given_as_numbers(name, found):
    assert f"`{name}`" in refused(V2 | {name: found})
    if found is None:
        assert f"`{name}`" in refused(without(V2, name))


@pytest.mark.parametrize("name", sorted(without(SHAPE, "rms_norm_eps")))
@pytest.mark.parametrize("found", [64.0, 2**40], ids=repr)
def test_sizes_have_to_be_plausible_integers(name, found):
    assert f"`{name}`" in refused(V2 | {name: found})


@pytest.mark.parametrize(
    "name, found",
    [
        *(("block_size", found) for found in (0, -1, "8", True, 8.0, 10**9)),
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
def test_dflash_fields_refused(name, found):
    assert f"`{name}`" in refused(nested(**{name: found}) | {name: None})
    assert f"`{name}`" in refused(nested(**{name: None}) | {name: found})


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
def test_top_level_fields_refused(name, found):
    config = V2 if name != "dflash_query_causal" else without(V2, "is_causal")
    message = refused(config | {name: found})
    assert f"`{name}`" in message
    assert found is None or repr(found) in message


@pytest.mark.parametrize("section", ["quantization_config", "compression_config", "quantization"])
@pytest.mark.parametrize("method", ["awq", "gptq", "compressed-tensors", "fp8", "bitsandbytes"])
def test_other_quantisation_formats_are_refused_by_name(section, method):
    message = refused(V2 | {section: {"quant_method": method, "bits": 4, "group_size": 128}})
    assert method in message and "quant_method" in message


@pytest.mark.parametrize("field", ["selector_rank", "conv_kernel_size"])
def test_dflash_1_has_neither_selector_nor_convolution(field):
    assert f"`{field}` is 2" in refused(V1 | {field: 2})


def test_taps_or_depth_have_to_be_given():
    config = nested(target_layer_ids=None) | dict(num_target_layers=None)
    assert "`target_layer_ids`" in refused(config)


# --- speculators


def test_speculators_layout_gives_the_same_drafter():
    args = read(SPECULATORS)
    assert args == read(V2 | dict(num_target_layers=None))


def test_speculators_leave_out_what_is_default_in_qwen3():
    layer = dict(num_hidden_layers=1, layer_types=[SLIDING])
    args = read(SPECULATORS | dict(transformer_layer_config=layer))
    assert (args.vocab_size, args.hidden_size, args.intermediate_size) == (151936, 4096, 22016)
    assert (args.num_attention_heads, args.num_key_value_heads, args.head_dim) == (32, 32, 128)
    assert (args.rms_norm_eps, args.max_position_embeddings) == (1e-6, 32768)
    assert (args.rope_parameters[0]["rope_theta"], args.sliding_window) == (1e4, 4096)


@pytest.mark.parametrize(
    "kind, non_causal, expected",
    [
        ("dflash2", None, [False, False]),
        ("dflash2", False, [True, False]),
        ("dflash2", True, [False, False]),
        ("dflash", None, [True, False]),
        ("dflash", True, [False, False]),
    ],
)
def test_speculators_causality(kind, non_causal, expected):
    layer = SPECULATORS["transformer_layer_config"] | dict(layer_types=[SLIDING, FULL])
    config = SPECULATORS | dict(speculators_model_type=kind, transformer_layer_config=layer)
    if kind == "dflash":
        config = without(config, "conv_kernel_size", "selector_rank", "selector_top_k")
    if non_causal is not None:
        config |= dict(sliding_window_non_causal=non_causal)
    args = read(config)
    assert (args.causal, args.generation) == (expected, 2 if kind == "dflash2" else 1)


@pytest.mark.parametrize("kind", ["DFlash2DraftModel", "DFlashDraftModel"])
def test_speculators_without_a_type_go_by_architecture(kind):
    config = without(SPECULATORS, "speculators_model_type") | dict(architectures=[kind])
    if kind == "DFlashDraftModel":
        config = without(config, "conv_kernel_size", "selector_rank", "selector_top_k")
    assert read(config).generation == (2 if kind == "DFlash2DraftModel" else 1)


def test_speculators_keep_their_other_fields():
    extra = dict(
        quantization={"bits": 4, "group_size": 64}, output_multiplier=0.5, input_embedding_scale=2.0
    )
    args = read(SPECULATORS | extra | dict(draft_vocab_size=512))
    assert args.quantization == {"bits": 4, "group_size": 64}
    assert (args.output_multiplier, args.input_embedding_scale) == (0.5, 2.0)


@pytest.mark.parametrize(
    "name, found",
    [
        ("speculators_model_type", "eagle3"),
        ("speculators_model_type", None),
        ("speculators_model_type", ["dflash"]),
        ("aux_hidden_state_layer_ids", [0, 2]),
        ("aux_hidden_state_layer_ids", []),
        ("aux_hidden_state_layer_ids", None),
        ("aux_hidden_state_layer_ids", ["1"]),
        ("aux_hidden_state_layer_ids", 3),
        ("sliding_window_non_causal", "true"),
        ("transformer_layer_config", []),
        ("sample_from_anchor", True),
        ("draft_vocab_size", 256),
    ],
    ids=lambda value: repr(value),
)
def test_speculators_refused(name, found):
    assert f"`{name}`" in refused(SPECULATORS | {name: found})


def test_the_embedded_drafter_is_read():
    assets = Path(__file__).parent.parent / "mlx_dflash2" / "assets"
    for config in assets.glob("*/config.json"):
        assert read(json.loads(config.read_text())).generation == 2
