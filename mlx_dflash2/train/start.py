"""Start a drafter's training: from random weights, the target's last layers or another drafter."""

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..drafter.args import DrafterArgs
from ..drafter.model import Drafter
from ..targets import Target
from .options import PARTS

_STD = 0.02
_MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
# Model files whose layers have norms before attention and MLP alone, as a drafter's layers do, and
# whose norm weights are factors.
_PRE_NORM = (
    "ernie4_5", "hunyuan_v1_dense", "llama", "mixtral", "phi3", "qwen2", "qwen2_moe", "qwen3",
    "qwen3_5", "qwen3_moe", "qwen3_next", "seed_oss",
)  # fmt: skip


def new_drafter(args: DrafterArgs, key: mx.array) -> Drafter:
    """Make a drafter with random matrices, and convolutions and a selector without effect."""
    drafter, weights = Drafter(args), []
    for number, (name, value) in enumerate(dict(tree_flatten(drafter.parameters())).items()):
        if name.endswith("base_kernel"):
            value = mx.concatenate(
                [mx.ones_like(value[:, :1]), mx.zeros_like(value[:, 1:])], axis=1
            )
        elif "kernel_projection" in name or "successor_codebook" in name:
            value = mx.zeros_like(value)
        elif value.ndim == 2:
            own = mx.random.split(key, number + 1)[number]
            value = _STD * mx.random.normal(value.shape, key=own)
        else:
            continue
        weights.append((name, value))
    drafter.load_weights(weights, strict=False)
    return drafter


def unpacked(module: nn.Module) -> mx.array:
    """Return a module's matrix in float32, dequantized if need be."""
    if "scales" not in module:
        return module.weight.astype(mx.float32)
    scheme = {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}
    biases = module.get("biases")
    return mx.dequantize(module.weight, module.scales, biases, **scheme).astype(mx.float32)


def from_drafter(old: Drafter, args: DrafterArgs, key: mx.array) -> Drafter:
    """Start as another drafter, with new parts and layers that have no effect at first.

    ``args`` are the old drafter's with more layers or parts; ``key`` is for random weights.
    """
    drafter, weights = new_drafter(args, key), {}
    packed = {path: module for path, module in old.named_modules() if "scales" in module}
    for name, value in dict(tree_flatten(old.parameters())).items():
        path = name.rpartition(".")[0]
        if path in packed:
            weights[f"{path}.weight"] = unpacked(packed[path])
        else:
            weights[name] = value.astype(mx.float32)
    drafter.load_weights(list(weights.items()), strict=False)
    for layer in drafter.layers[len(old.layers) :]:
        for matrix in (layer.self_attn.o_proj, layer.mlp.down_proj):
            matrix.weight = mx.zeros_like(matrix.weight)
    return drafter


def from_target_layers(drafter: Drafter, target: Target) -> list[str]:
    """Copy the target's last layers and final norm into the drafter, in place.

    Returns:
        list of str: The target's parameters that a drafter does not have.

    Raises:
        ValueError: if the target's norms or rotary embedding differ from a drafter's, or if it
            has too few layers, or not the matrices or shapes of the drafter's.
    """
    file = type(target.language_model).__module__.rpartition(".")[2]
    if file not in _PRE_NORM:
        raise ValueError(
            f"`init` from the target is not possible for a {file} model, whose norms differ from a "
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
    """Return the names of a layer's parameters, a packed matrix as one."""
    names = dict(tree_flatten(layer.parameters()))
    return {name for name in names if not name.endswith((".scales", ".biases"))}


def _refuse_other_pairs(layer: nn.Module) -> None:
    """A drafter rotates a head's halves against each other, and its rows are in that order."""
    rope = getattr(getattr(layer, "self_attn", None), "rope", None)
    if getattr(rope, "traditional", False):
        raise ValueError(
            "`init` from the target is not possible for a model that rotates neighboring "
            "channels; use random."
        )


def _copy_matrix(new: nn.Module, old: nn.Module | None, name: str) -> None:
    weight = None if old is None else unpacked(old)
    if weight is None or weight.shape != new.weight.shape:
        found = "none" if weight is None else list(weight.shape)
        raise ValueError(
            f"`init` from the target needs its `{name}` to be {list(new.weight.shape)} but it is "
            f"{found}; use random."
        )
    new.weight = weight


def freeze_but(drafter: Drafter, parts: Sequence[str]) -> None:
    """Freeze all but some of ``PARTS``.

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


def frozen_parameters(drafter: Drafter) -> dict[str, mx.array]:
    """Return the parameters that are not trained, by name."""
    trained = dict(tree_flatten(drafter.trainable_parameters()))
    return {k: v for k, v in dict(tree_flatten(drafter.parameters())).items() if k not in trained}


def part_of(name: str) -> str:
    """Return which of ``PARTS`` a module or parameter belongs to, by its name."""
    if name.startswith("candidate_selector"):
        return "selector"
    return "conv" if "_conv" in name else "backbone"
