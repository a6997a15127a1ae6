"""Configs in the speculators layout, rewritten in the published DFlash layout."""

from typing import Any

# Only values that differ from these are serialised by that format.
_QWEN3_DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
}
_MOVED = (
    "block_size",
    "mask_token_id",
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
    "sample_from_anchor",
    "draft_vocab_size",
)
_ARCHITECTURES = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel"}


def is_speculators(config: dict[str, Any]) -> bool:
    """Whether a drafter's config is in the speculators layout."""
    return "speculators_model_type" in config or "speculators_config" in config


def from_speculators(config: dict[str, Any]) -> dict[str, Any]:
    """The same drafter's config in the published layout.

    Tap ids of that format index the hidden states from the embedding's output on, ours the
    decoder layers: they differ by one.

    Raises:
        ValueError: if the drafter is of another kind, or taps the embedding's output.
    """
    kind = config.get("speculators_model_type")
    if kind is None and "DFlash2DraftModel" in config.get("architectures", []):
        kind = "dflash2"
    if kind not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise ValueError(
            f"Drafter config: `speculators_model_type` is {kind!r} but has to be one of {known}."
        )
    layer = _QWEN3_DEFAULTS | (config.get("transformer_layer_config") or {})
    if not layer.get("rope_parameters"):
        layer.setdefault("rope_theta", 10000.0)
    states = config.get("aux_hidden_state_layer_ids")
    if not states or min(states) < 1:
        raise ValueError(
            f"Drafter config: `aux_hidden_state_layer_ids` is {states!r} but has to list hidden "
            "states from 1 on (0 is the embedding's output, which no drafter taps)."
        )
    non_causal = config.get("sliding_window_non_causal", kind == "dflash2")
    moved = {name: config[name] for name in _MOVED if name in config}
    moved["target_layer_ids"] = [state - 1 for state in states]
    result = layer | {"architectures": [_ARCHITECTURES[kind]], "dflash_config": moved}
    if non_causal:
        result["is_causal"] = False
    return result
