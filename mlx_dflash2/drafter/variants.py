"""Drafters made from another one: the same weights, connected or configured differently."""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from .model import Drafter

SELECTOR = "candidate_selector."


def variant(
    drafter: Drafter, weights: dict[str, mx.array] | None = None, **changes: Any
) -> Drafter:
    """Make a drafter with other settings or tensors; everything else is shared, not copied.

    Args:
        drafter (Drafter): Left as it is.
        weights (dict, optional): All tensors by name. Default: ``None``, the drafter's own.
        changes: Fields of :class:`DrafterArgs`, which may not change a shape.
    """
    new = Drafter(replace(drafter.args, **changes))
    modules = dict(drafter.named_modules())

    def scheme(path: str, _: nn.Module) -> bool | dict[str, Any]:
        old = modules[path]
        if "scales" not in old:
            return False
        return {"group_size": old.group_size, "bits": old.bits, "mode": old.mode}

    nn.quantize(new, class_predicate=scheme)
    weights = parameters(drafter) if weights is None else weights
    new.load_weights(list(weights.items()))
    new.eval()
    return new


def parameters(drafter: Drafter) -> dict[str, mx.array]:
    """Return the drafter's tensors by name."""
    return dict(tree_flatten(drafter.parameters()))


def without_selector(drafter: Drafter) -> Drafter:
    """Take the best token of each row, whatever the tokens beside it are."""
    weights = parameters(drafter)
    kept = {name: value for name, value in weights.items() if not name.startswith(SELECTOR)}
    return variant(drafter, kept, selector_rank=0)


def with_codebooks_swapped(drafter: Drafter) -> Drafter:
    """Swap the predecessor and successor tables."""
    names = {"predecessor_codebook": "successor_codebook"}
    names |= {new: old for old, new in names.items()}

    def swapped(name: str) -> str:
        head, _, kind = name.removeprefix(SELECTOR).partition(".")
        return f"{SELECTOR}{names[head]}.{kind}" if head in names else name

    return variant(drafter, {swapped(name): value for name, value in parameters(drafter).items()})


def with_conv_sides_swapped(drafter: Drafter) -> Drafter:
    """Swap the convolutions before and after every sublayer."""
    weights = parameters(drafter)
    for name, value in weights.items():
        if name.endswith("base_kernel"):
            weights[name] = value[::-1]
        elif ".kernel_projection." in name:
            weights[name] = mx.concatenate([*mx.split(value, 2)][::-1])
    return variant(drafter, weights)


def with_taps(drafter: Drafter, shift: int, num_layers: int) -> Drafter | None:
    """Tap some layers later; ``None`` where a target of ``num_layers`` has no such layers."""
    ids = [layer + shift for layer in drafter.target_layer_ids]
    if ids[0] < 0 or ids[-1] >= num_layers:
        return None
    return variant(drafter, target_layer_ids=ids)


def with_causal_flipped(drafter: Drafter) -> Drafter:
    """Make causal layers bidirectional within the block, and the other way round."""
    return variant(drafter, causal=[not causal for causal in drafter.args.causal])


def with_mask_id(drafter: Drafter, mask_token_id: int) -> Drafter:
    """Put another id in the rows to fill."""
    return variant(drafter, mask_token_id=mask_token_id)


def with_rope_pairing_flipped(drafter: Drafter) -> Drafter:
    """Rotate adjacent pairs instead of halves, or the other way round."""
    return variant(drafter, rope_traditional=not drafter.args.rope_traditional)
