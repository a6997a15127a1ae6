"""A drafter that begins as the target's last layers."""

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..drafter.model import Drafter
from ..targets import Target
from .init import unpacked

_MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
# The model files whose layers norm what enters attention and MLP, and nothing else, with weights
# that are factors: as a drafter's layers do.
_PRE_NORM = (
    "ernie4_5", "hunyuan_v1_dense", "llama", "mixtral", "phi3", "qwen2", "qwen2_moe", "qwen3",
    "qwen3_5", "qwen3_moe", "qwen3_next", "seed_oss",
)  # fmt: skip


def from_target_layers(drafter: Drafter, target: Target) -> list[str]:
    """Copy the target's last layers and final norm into the drafter, in place.

    Returns:
        list of str: The target's parameters that were left out, since a drafter has none of them.

    Raises:
        ValueError: if the target's norms have another role than a drafter's, it rotates other
            pairs, it has too few layers, or a layer of it has no such matrix, or one of another
            shape.
    """
    file = type(target.language_model).__module__.rpartition(".")[2]
    if file not in _PRE_NORM:
        raise ValueError(
            f"`init` from the target is not possible for a {file} model, whose norms are not a "
            "drafter's; use random."
        )
    layers, left_out = target.layers[-len(drafter.layers) :], set()
    if len(layers) < len(drafter.layers):
        raise ValueError(
            f"`init` from the target needs it to have {len(drafter.layers)} layers but it has "
            f"{len(layers)}; use random."
        )
    for number, (new, old) in enumerate(zip(drafter.layers, layers, strict=True)):
        _refuse_other_pairs(old)
        for part, names in zip(("self_attn", "mlp"), _MATRICES, strict=True):
            for name in names:
                source = getattr(getattr(old, part, None), name, None)
                _copy_matrix(new[part][name], source, f"layers.{number}.{part}.{name}")
        for norm in ("q_norm", "k_norm"):
            if norm in old.self_attn:
                new.self_attn[norm].weight = old.self_attn[norm].weight.astype(mx.float32)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            new[norm].weight = old[norm].weight.astype(mx.float32)
        left_out |= _names(old) - _names(new)
    drafter.norm.weight = target.inner.norm.weight.astype(mx.float32)
    return sorted(left_out)


def _names(layer: nn.Module) -> set[str]:
    """A layer's parameters by name, a packed matrix as the one parameter that it stands for."""
    names = [name for name, _ in tree_flatten(layer.parameters())]
    return {name for name in names if not name.endswith((".scales", ".biases"))}


def _refuse_other_pairs(layer: nn.Module):
    """A drafter turns a head's halves against each other, and its matrices' rows are so ordered."""
    rope = getattr(getattr(layer, "self_attn", None), "rope", None)
    if getattr(rope, "traditional", False):
        raise ValueError(
            "`init` from the target is not possible for a model that rotates neighbouring "
            "channels; use random."
        )


def _copy_matrix(new: nn.Module, old: nn.Module | None, name: str):
    weight = None if old is None else unpacked(old)
    if weight is None or weight.shape != new.weight.shape:
        found = "none" if weight is None else list(weight.shape)
        raise ValueError(
            f"`init` from the target needs its `{name}` to be {list(new.weight.shape)} but it is "
            f"{found}; use random."
        )
    new.weight = weight
