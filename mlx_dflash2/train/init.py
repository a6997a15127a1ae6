"""Where a drafter's training begins: nothing, some of the target's layers, or another drafter."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..drafter import Drafter, DraftLayer
from ..drafter_args import DrafterArgs, default_target_layer_ids
from ..selector import CandidateSelector
from .codebooks import CODEBOOKS, FactoredCodebook, factor

PARTS = ("backbone", "conv", "selector")
_STD = 0.02
_MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
# The model files whose layers norm what enters attention and MLP, and nothing else, with weights
# that are factors: as a drafter's layers do.
_PRE_NORM = (
    "ernie4_5", "hunyuan_v1_dense", "llama", "mixtral", "phi3", "qwen2", "qwen2_moe", "qwen3",
    "qwen3_5", "qwen3_moe", "qwen3_next", "seed_oss",
)  # fmt: skip


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


def new_args(shape: Shape, target: Any, config: dict[str, Any]) -> DrafterArgs:
    """The args of a drafter for a target.

    Args:
        shape (Shape): What was chosen.
        target (Target): The target.
        config (dict): The target's config.json.

    Raises:
        ValueError: naming the field that is impossible, as for a published drafter.
    """
    text = config | {k: v for k, v in (config.get("text_config") or {}).items() if v is not None}
    found, heads = target.shape, _required(text, "num_attention_heads")
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
        "intermediate_size": _required(text, "intermediate_size")
        if shape.intermediate_size is None
        else shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": text.get("num_key_value_heads") or heads,
        "head_dim": text.get("head_dim") or found.hidden_size // heads,
        "vocab_size": found.vocab_size,
        "rms_norm_eps": text.get("rms_norm_eps", 1e-6),
        "max_position_embeddings": text.get("max_position_embeddings", 32768),
        "rope_theta": _own_theta(text, kind) if shape.rope_theta is None else shape.rope_theta,
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


def _required(config: dict[str, Any], name: str) -> Any:
    if config.get(name) is None:
        advice = "; give --intermediate-size" if name == "intermediate_size" else ""
        raise ValueError(f"`{name}` is not in the target's config{advice}.")
    return config[name]


def _own_theta(config: dict[str, Any], kind: str) -> float:
    """The base of the target's rotations, wherever its config says it for this kind of layer."""
    for name in (None, "rope_parameters", "rope_scaling"):
        section = config if name is None else config.get(name) or {}
        nested = section.get(kind) if name else None
        for level in (nested if isinstance(nested, dict) else {}, section):
            if level.get("rope_theta") is not None:
                return level["rope_theta"]
    return 10000.0


def new_drafter(args: DrafterArgs, key: mx.array) -> Drafter:
    """A drafter with random matrices, convolutions that change nothing and a selector likewise."""
    drafter = Drafter(args)
    _randomise(drafter, key)
    return drafter


def _randomise(module: nn.Module, key: mx.array):
    """Normal matrices; what changes nothing at first is set so, after everything else."""
    weights = []
    for number, (name, value) in enumerate(tree_flatten(module.parameters())):
        if value.ndim == 2:
            drawn = mx.random.normal(value.shape, key=mx.random.split(key, number + 1)[number])
            weights.append((name, _STD * drawn))
    module.load_weights(weights, strict=False)
    neutralise(module)


def neutralise(module: nn.Module):
    """Make every convolution the identity and every selector's pair scores zero."""
    for name, value in tree_flatten(module.parameters()):
        silent = "kernel_projection" in name or "successor_codebook" in name
        if name.endswith("base_kernel"):
            new = mx.concatenate([mx.ones_like(value[:, :1]), mx.zeros_like(value[:, 1:])], axis=1)
        elif silent:
            new = mx.zeros_like(value)
        else:
            continue
        module.load_weights([(name, new)], strict=False)


def from_target_layers(drafter: Drafter, target: Any):
    """Copy the target's last layers and final norm into the drafter, in place.

    Raises:
        ValueError: if the target's norms have another role than a drafter's, it has too few
            layers, or a layer of it has no such matrix, or one of another shape.
    """
    file = type(target.language_model).__module__.rpartition(".")[2]
    if file not in _PRE_NORM:
        raise ValueError(
            f"`init` from the target is not possible for a {file} model, whose norms are not a "
            "drafter's; use random."
        )
    layers = target.layers[-len(drafter.layers) :]
    if len(layers) < len(drafter.layers):
        raise ValueError(
            f"`init` from the target needs it to have {len(drafter.layers)} layers but it has "
            f"{len(layers)}; use random."
        )
    for number, (new, old) in enumerate(zip(drafter.layers, layers, strict=True)):
        for part, names in zip(("self_attn", "mlp"), _MATRICES, strict=True):
            for name in names:
                source = getattr(getattr(old, part, None), name, None)
                _copy_matrix(new[part][name], source, f"layers.{number}.{part}.{name}")
        for norm in ("q_norm", "k_norm"):
            if norm in old.self_attn:
                new.self_attn[norm].weight = old.self_attn[norm].weight.astype(mx.float32)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            new[norm].weight = old[norm].weight.astype(mx.float32)
    drafter.norm.weight = target.inner.norm.weight.astype(mx.float32)


def _copy_matrix(new: nn.Module, old: nn.Module | None, name: str):
    weight = None if old is None else unpacked(old)
    if weight is None or weight.shape != new.weight.shape:
        found = "none" if weight is None else list(weight.shape)
        raise ValueError(
            f"`init` from the target needs its `{name}` to be {list(new.weight.shape)} but it is "
            f"{found}; use random."
        )
    new.weight = weight


def unpacked(module: nn.Module) -> mx.array:
    """A module's matrix in float32, dequantised if need be."""
    if "scales" not in module:
        return module.weight.astype(mx.float32)
    scheme = {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}
    biases = module.get("biases")
    return mx.dequantize(module.weight, module.scales, biases, **scheme).astype(mx.float32)


def from_drafter(old: Drafter, args: DrafterArgs, key: mx.array) -> Drafter:
    """A drafter that begins as another one, with the parts that the other lacks added.

    Convolutions and selector are added so that they change nothing at first; layers are added
    behind the others, giving nothing to the stream.

    Args:
        old (Drafter): Quantised or not.
        args (DrafterArgs): Of the new drafter: the old one's with more layers or parts.
        key (mx.array): For what is random.
    """
    drafter = new_drafter(args, key)
    weights = {}
    for path, module in old.named_modules():
        if "scales" in module:
            weights[f"{path}.weight"] = unpacked(module)
    stored = dict(tree_flatten(old.parameters()))
    for name, value in stored.items():
        path = name.rpartition(".")[0]
        if f"{path}.scales" not in stored:
            weights[name] = value.astype(mx.float32)
    drafter.load_weights(list(weights.items()), strict=False)
    for layer in drafter.layers[len(old.layers) :]:
        _silence(layer)
    return drafter


def _silence(layer: DraftLayer):
    for matrix in (layer.self_attn.o_proj, layer.mlp.down_proj):
        matrix.weight = mx.zeros_like(matrix.weight)


def factor_codebooks(selector: CandidateSelector, embed: Any, known: bool) -> float:
    """Factor a selector's codebooks through the target's embedding, in place.

    Args:
        selector (CandidateSelector): With ordinary codebooks.
        embed (callable): The target's, ids to rows.
        known (bool): Whether the tables are worth keeping, as nearly as that goes; otherwise the
            selector begins as one that changes nothing.

    Returns:
        float: The share of the tables' norm that is kept, of the one that keeps less.
    """
    kept = 1.0
    for name in CODEBOOKS:
        table = selector[name].weight
        if known:
            selector[name] = factor(embed, table)
            norm = mx.linalg.norm(table.astype(mx.float32)).item()
            if norm > 0:
                kept = min(kept, mx.linalg.norm(selector[name].table(len(table))).item() / norm)
            continue
        width = embed(mx.array([0])).shape[-1]
        scale = 0.0 if name.startswith("successor") else width**-0.5
        weight = scale * mx.random.normal((table.shape[1], width), key=mx.random.key(0))
        selector[name] = FactoredCodebook(embed, weight)
    return kept


def freeze_but(drafter: Drafter, parts: Sequence[str]):
    """Leave only some of ``PARTS`` to be trained.

    Raises:
        ValueError: if a part is unknown, or the drafter has none of them.
    """
    unknown = set(parts) - set(PARTS)
    if unknown or not parts:
        raise ValueError(f"`only` has to name some of {', '.join(PARTS)} but is {list(parts)}.")
    drafter.unfreeze()
    for name, module in drafter.named_modules():
        if part_of(name) not in parts:
            module.freeze(recurse=False)
    if not tree_flatten(drafter.trainable_parameters()):
        raise ValueError(f"The drafter has no {' or '.join(parts)} to train.")


def part_of(name: str) -> str:
    """Which of ``PARTS`` a module or parameter belongs to, by its name."""
    if name.startswith("candidate_selector"):
        return "selector"
    return "conv" if "_conv" in name else "backbone"
