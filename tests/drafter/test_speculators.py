"""Drafter configs in the speculators layout."""

import pytest
from support.drafters import FULL, SLIDING, SPECULATORS, V2, read_config, refused_config, without


def test_speculators_layout_gives_the_same_drafter():
    args = read_config(SPECULATORS)
    assert args == read_config(V2 | dict(num_target_layers=None))


def test_speculators_leave_out_what_is_default_in_qwen3():
    layer = dict(num_hidden_layers=1, layer_types=[SLIDING])
    args = read_config(SPECULATORS | dict(transformer_layer_config=layer))
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
    args = read_config(config)
    assert (args.causal, args.generation) == (expected, 2 if kind == "dflash2" else 1)


@pytest.mark.parametrize("kind", ["DFlash2DraftModel", "DFlashDraftModel"])
def test_speculators_without_a_type_go_by_architecture(kind):
    config = without(SPECULATORS, "speculators_model_type") | dict(architectures=[kind])
    if kind == "DFlashDraftModel":
        config = without(config, "conv_kernel_size", "selector_rank", "selector_top_k")
    assert read_config(config).generation == (2 if kind == "DFlash2DraftModel" else 1)


def test_speculators_keep_their_other_fields():
    extra = dict(
        quantization={"bits": 4, "group_size": 64}, output_multiplier=0.5, input_embedding_scale=2.0
    )
    args = read_config(SPECULATORS | extra | dict(draft_vocab_size=512))
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
    assert f"`{name}`" in refused_config(SPECULATORS | {name: found})
