"""Where a drafter's training begins, if not from a target: nothing, or another drafter."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..drafter.args import DrafterArgs
from ..drafter.model import Drafter, DraftLayer
from ..drafter.selector import CandidateSelector
from .codebooks import CODEBOOKS, FactoredCodebook, factor

PARTS = ("backbone", "conv", "selector")
_STD = 0.02


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


def frozen_parameters(drafter: Drafter) -> dict[str, mx.array]:
    """By name, what of a drafter is not trained."""
    trained = dict(tree_flatten(drafter.trainable_parameters()))
    return {k: v for k, v in tree_flatten(drafter.parameters()) if k not in trained}


def part_of(name: str) -> str:
    """Which of ``PARTS`` a module or parameter belongs to, by its name."""
    if name.startswith("candidate_selector"):
        return "selector"
    return "conv" if "_conv" in name else "backbone"
