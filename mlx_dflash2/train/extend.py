"""What kind of drafter comes of another one with layers or parts added."""

from dataclasses import replace
from typing import Any

from ..drafter.args import DrafterArgs
from .shape import Shape

_PARTS = (
    ("has_conv", ("conv_kernel_size", "conv_group_size")),
    ("has_selector", ("selector_rank", "selector_top_k")),
)


def extended_args(args: DrafterArgs, chosen: dict[str, Any]) -> DrafterArgs:
    """A drafter's args with layers or parts added.

    Args:
        args (DrafterArgs): Of the drafter to begin from.
        chosen (dict): Fields of :class:`.init.Shape` that were asked for.

    Raises:
        ValueError: for a change that its weights do not allow.
    """
    chosen = dict(chosen)
    layers = chosen.pop("num_layers", args.num_hidden_layers)
    if layers < args.num_hidden_layers:
        _refuse("num_layers", layers, args.num_hidden_layers)
    added = _added(args, chosen)
    for name, value in chosen.items():
        found = _own(args, name)
        # A flag that is not given asks for nothing.
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
    """The sizes of parts that the drafter lacks, taken out of what was chosen."""
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
    """What the drafter has of a field, once for layers that are alike."""
    if name == "causal":
        return sorted(set(args.causal))
    if name == "rope_theta":
        return sorted({rope["rope_theta"] for rope in args.rope_parameters})
    return [getattr(args, name)]


def _refuse(name: str, value: Any, found: Any):
    raise ValueError(f"`{name}` is {value} but the drafter to begin from has {found}.")
