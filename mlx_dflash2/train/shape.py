"""The args of the drafter to train: new for a target, or another drafter's with parts added."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..drafter.args import DrafterArgs, default_target_layer_ids
from ..targets import Target

_PARTS = (
    ("has_conv", ("conv_kernel_size", "conv_group_size")),
    ("has_selector", ("selector_rank", "selector_top_k")),
)


@dataclass(frozen=True)
class Shape:
    """What may be chosen about a new drafter; ``None`` is the target's or the usual value."""

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
    """Make the args of a new drafter for a target.

    Args:
        shape (Shape): What was chosen.
        target, config: The target and its config.json.

    Raises:
        ValueError: naming the field that is not possible, as for a published drafter.
    """
    stated = _stated(config) | _stated(config.get("text_config") or {})
    # What a config leaves out is what mlx-lm computes with.
    usual = _stated(vars(target.language_model.args))
    text, found = usual | stated, target.shape
    heads = _required(text, "num_attention_heads", "use another target")
    theta, width = shape.rope_theta, shape.intermediate_size
    if width is None:
        width = _required(text, "intermediate_size", "give --intermediate-size")
    if theta is None:
        theta = _own_theta(_layer_type(shape), stated, usual)
    second = bool(shape.selector_rank or shape.conv_kernel_size)
    published = {
        "architectures": ["DFlash2DraftModel" if second else "DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": found.hidden_size,
        "intermediate_size": width,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": text.get("num_key_value_heads") or heads,
        "head_dim": text.get("head_dim") or found.hidden_size // heads,
        "vocab_size": found.vocab_size,
        "rms_norm_eps": text.get("rms_norm_eps", 1e-6),
        "max_position_embeddings": text.get("max_position_embeddings", 32768),
        "rope_theta": theta,
        "layer_types": [_layer_type(shape)] * shape.num_layers,
        "sliding_window": shape.sliding_window,
        "is_causal": shape.causal,
        "num_target_layers": found.num_layers,
        "output_multiplier": text.get("output_multiplier"),
        "final_logit_softcapping": text.get("final_logit_softcapping"),
        "dflash_config": _dflash_config(shape, target, second),
    }
    args = DrafterArgs.from_dict(published)
    # The published format has no DFlash 2 without a selector; one may be added in a later run.
    return args if shape.selector_rank else replace(args, selector_rank=0)


def _dflash_config(shape: Shape, target: Target, second: bool) -> dict[str, Any]:
    layers, mask = target.shape.num_layers, shape.mask_token_id
    usual = min(max(shape.num_layers, 4), layers - 3) if layers > 4 else 1
    config = {
        "block_size": shape.block_size,
        "target_layer_ids": list(shape.target_layer_ids or default_target_layer_ids(usual, layers)),
        "mask_token_id": target.shape.vocab_size - 1 if mask is None else mask,
    }
    if second:
        config |= {
            "conv_kernel_size": shape.conv_kernel_size,
            "conv_group_size": shape.conv_group_size,
            "selector_rank": shape.selector_rank or 1,
            "selector_top_k": shape.selector_top_k,
        }
    return config


def _layer_type(shape: Shape) -> str:
    return "full_attention" if shape.sliding_window is None else "sliding_attention"


def _stated(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _required(config: dict[str, Any], name: str, advice: str) -> Any:
    if name not in config:
        raise ValueError(f"`{name}` is not in the target's config; {advice}.")
    return config[name]


def _own_theta(kind: str, *configs: dict[str, Any]) -> float:
    """Find the base of the target's rotary embedding for this kind of layer."""
    for config in configs:
        for name in (None, "rope_parameters", "rope_scaling"):
            section = config if name is None else config.get(name) or {}
            nested = section.get(kind) if name else None
            for level in (nested if isinstance(nested, dict) else {}, section):
                if level.get("rope_theta") is not None:
                    return level["rope_theta"]
    raise ValueError("`rope_theta` is not in the target's config; give --rope-theta.")


def extended_args(args: DrafterArgs, chosen: dict[str, Any]) -> DrafterArgs:
    """Add layers or parts to a drafter's args.

    ``chosen`` are the fields of :class:`Shape` that were asked for.

    Raises:
        ValueError: for a change that the drafter's weights do not allow.
    """
    chosen = dict(chosen)
    layers = chosen.pop("num_layers", args.num_hidden_layers)
    if layers < args.num_hidden_layers:
        _refuse("num_layers", layers, args.num_hidden_layers)
    added = _added(args, chosen)
    for name, value in chosen.items():
        found = _own(args, name)
        # A flag that is not set asks for nothing.
        if (name != "causal" or value) and any(own != value for own in found):
            _refuse(name, value, " and ".join(map(str, found)))
    more = layers - args.num_hidden_layers
    extended = replace(
        args,
        num_hidden_layers=layers,
        layer_types=args.layer_types + args.layer_types[-1:] * more,
        causal=args.causal + args.causal[-1:] * more,
        rope_parameters=args.rope_parameters + args.rope_parameters[-1:] * more,
        quantization=None,
        **added,
    )
    return replace(extended, generation=2 if extended.has_conv or extended.has_selector else 1)


def _added(args: DrafterArgs, chosen: dict[str, Any]) -> dict[str, Any]:
    """Take the sizes of parts that the drafter lacks out of ``chosen``."""
    added, defaults = {}, Shape()
    for part, names in _PARTS:
        for name in names:
            value = chosen.pop(name, None)
            if not getattr(args, part):
                added[name] = getattr(defaults, name) if value is None else value
            elif value is not None and value != getattr(args, name):
                _refuse(name, value, getattr(args, name))
    return added


def _own(args: DrafterArgs, name: str) -> list[Any]:
    """Return the drafter's different values of a field; layers may differ."""
    if name == "causal":
        return sorted(set(args.causal))
    if name == "rope_theta":
        return sorted({rope["rope_theta"] for rope in args.rope_parameters})
    return [getattr(args, name)]


def _refuse(name: str, value: Any, found: Any) -> None:
    raise ValueError(f"`{name}` is {value} but the drafter to start from has {found}.")
