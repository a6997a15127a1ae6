"""Configs in the speculators layout, rewritten in the published DFlash layout."""

from typing import Any

from .fields import architectures, is_integer, refuse, section

# That format writes only values that differ from these.
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
    "sliding_window": 4096,
}
_DEFAULT_THETA = 10000.0
_ARCHITECTURES = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel"}
_CONTAINERS = ("transformer_layer_config", "speculators_config", "speculators_model_type")


def is_speculators(config: dict[str, Any]) -> bool:
    """Tell whether a drafter's config is in the speculators layout."""
    return "speculators_model_type" in config or "speculators_config" in config


def from_speculators(config: dict[str, Any]) -> dict[str, Any]:
    """Rewrite a drafter's config in the published layout.

    Tap ids of that format count the embedding's output as 0, ours the first decoder layer: they
    differ by one.

    Raises:
        ValueError: if the drafter is of another kind, or taps the embedding's output.
    """
    kind = _kind(config)
    stated = section(config, "transformer_layer_config")
    layer = _QWEN3_DEFAULTS | {name: value for name, value in stated.items() if value is not None}
    if not section(layer, "rope_parameters"):
        layer.setdefault("rope_theta", _DEFAULT_THETA)
    states = config.get("aux_hidden_state_layer_ids")
    if not isinstance(states, list) or not states or not all(is_integer(i, 1) for i in states):
        refuse(
            "aux_hidden_state_layer_ids",
            states,
            "a list of hidden states from 1 on (0, the embedding's output, cannot be tapped)",
        )
    non_causal = config.get("sliding_window_non_causal", kind == "dflash2")
    if not isinstance(non_causal, bool):
        refuse("sliding_window_non_causal", non_causal, "true or false")
    own = {
        name: value
        for name, value in config.items()
        if name not in _CONTAINERS and value is not None
    }
    taps = {"target_layer_ids": [state - 1 for state in states]}
    return (
        layer
        | own
        | {
            "architectures": [_ARCHITECTURES[kind]],
            "dflash_config": section(config, "dflash_config") | taps,
            # Without the field the sliding layers are causal; the full ones never are.
            "is_causal": False if non_causal else None,
        }
    )


def _kind(config: dict[str, Any]) -> str:
    kind = config.get("speculators_model_type")
    if kind is None:
        for name, architecture in _ARCHITECTURES.items():
            if architecture in architectures(config):
                return name
    if not isinstance(kind, str) or kind not in _ARCHITECTURES:
        refuse("speculators_model_type", kind, "one of " + ", ".join(_ARCHITECTURES))
    return kind
