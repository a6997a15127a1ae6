"""What kind of drafter is trained for a target: what was chosen, the rest as the target has it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..drafter.args import DrafterArgs, default_target_layer_ids
from ..targets import Target


@dataclass(frozen=True)
class Shape:
    """What may be chosen about a new drafter; ``None`` is the target's own or the usual value."""

    num_layers: int = 5
    block_size: int = 16
    target_layer_ids: Sequence[int] | None = None
    mask_token_id: int | None = None
    sliding_window: int | None = None
    causal: bool = False
    conv_kernel_size: int = 2
    conv_group_size: int = 16
    selector_rank: int = 256
    selector_top_k: int = 16
    intermediate_size: int | None = None
    rope_theta: float | None = None


def new_args(shape: Shape, target: Target, config: dict[str, Any]) -> DrafterArgs:
    """The args of a drafter for a target.

    Args:
        shape (Shape): What was chosen.
        target (Target): The target.
        config (dict): The target's config.json.

    Raises:
        ValueError: naming the field that is impossible, as for a published drafter.
    """
    said = _stated(config) | _stated(config.get("text_config") or {})
    # What a config leaves out is what mlx-lm computes with.
    usual = _stated(vars(target.language_model.args))
    text, found = usual | said, target.shape
    heads = _required(text, "num_attention_heads", "use another target")
    taps = shape.target_layer_ids or default_target_layer_ids(
        min(max(shape.num_layers, 4), found.num_layers - 3) if found.num_layers > 4 else 1,
        found.num_layers,
    )
    generation = 2 if shape.selector_rank or shape.conv_kernel_size else 1
    draft = {
        "block_size": shape.block_size,
        "target_layer_ids": list(taps),
        "mask_token_id": found.vocab_size - 1
        if shape.mask_token_id is None
        else shape.mask_token_id,
    }
    if generation == 2:
        draft |= {
            "conv_kernel_size": shape.conv_kernel_size,
            "conv_group_size": shape.conv_group_size,
            "selector_rank": shape.selector_rank or 1,
            "selector_top_k": shape.selector_top_k,
        }
    kind = "full_attention" if shape.sliding_window is None else "sliding_attention"
    published = {
        "architectures": ["DFlash2DraftModel" if generation == 2 else "DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": found.hidden_size,
        "intermediate_size": _required(text, "intermediate_size", "give --intermediate-size")
        if shape.intermediate_size is None
        else shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": text.get("num_key_value_heads") or heads,
        "head_dim": text.get("head_dim") or found.hidden_size // heads,
        "vocab_size": found.vocab_size,
        "rms_norm_eps": text.get("rms_norm_eps", 1e-6),
        "max_position_embeddings": text.get("max_position_embeddings", 32768),
        "rope_theta": _own_theta(kind, said, usual)
        if shape.rope_theta is None
        else shape.rope_theta,
        "layer_types": [kind] * shape.num_layers,
        "sliding_window": shape.sliding_window,
        "is_causal": shape.causal,
        "num_target_layers": found.num_layers,
        "output_multiplier": text.get("output_multiplier"),
        "final_logit_softcapping": text.get("final_logit_softcapping"),
        "dflash_config": draft,
    }
    args = DrafterArgs.from_dict(published)
    # The published format has no DFlash 2 without a selector; in training it may come later.
    return args if shape.selector_rank else replace(args, selector_rank=0)


def _stated(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _required(config: dict[str, Any], name: str, advice: str) -> Any:
    if name not in config:
        raise ValueError(f"`{name}` is not in the target's config; {advice}.")
    return config[name]


def _own_theta(kind: str, *configs: dict[str, Any]) -> float:
    """The base of the target's rotations, wherever a config says it for this kind of layer."""
    for config in configs:
        for name in (None, "rope_parameters", "rope_scaling"):
            section = config if name is None else config.get(name) or {}
            nested = section.get(kind) if name else None
            for level in (nested if isinstance(nested, dict) else {}, section):
                if level.get("rope_theta") is not None:
                    return level["rope_theta"]
    raise ValueError("`rope_theta` is not in the target's config; give --rope-theta.")
