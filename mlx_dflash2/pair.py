"""Whether a drafter fits a target: one check, made before anything is decoded."""

from dataclasses import dataclass
from typing import Any

from .config_fields import is_integer
from .drafter_args import DrafterArgs

# Heads are padded to different multiples by different exports of one vocabulary.
MAX_VOCAB_PADDING = 1024


@dataclass(frozen=True)
class TargetShape:
    """What of a target a drafter depends on; ``vocab_size`` counts padding rows."""

    hidden_size: int
    vocab_size: int
    num_layers: int

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "TargetShape":
        """Read the shape from a target's config.json, also where the text model is nested.

        Raises:
            ValueError: naming the field that is missing or no positive integer.
        """
        nested = config.get("text_config") or {}
        if not isinstance(nested, dict):
            raise ValueError(f"Target config: `text_config` is {nested!r} but has to be an object.")
        text = config | {name: value for name, value in nested.items() if value is not None}
        names = ("hidden_size", "vocab_size", "num_hidden_layers")
        for name in names:
            if not is_integer(text.get(name), 1):
                found = text.get(name)
                raise ValueError(f"Target config: `{name}` is {found!r} but has to be 1 or more.")
        return cls(*(text[name] for name in names))


def check_fit(args: DrafterArgs, shape: TargetShape):
    """Refuse a drafter that was made for another target.

    A mismatch would not crash: it would only draft badly, so it is an error here.

    Raises:
        ValueError: naming the field, the drafter's value and the target's.
    """

    def refuse(name: str, found: Any, allowed: str):
        raise ValueError(
            f"The drafter does not fit the target: its `{name}` is {found} but {allowed}."
        )

    depth, hidden, vocab = shape.num_layers, shape.hidden_size, shape.vocab_size
    if args.hidden_size != hidden:
        refuse("hidden_size", args.hidden_size, f"the target's is {hidden}")
    if args.target_hidden_size != hidden:
        refuse("target_hidden_size", args.target_hidden_size, f"the target's is {hidden}")
    if args.num_target_layers_declared and args.num_target_layers != depth:
        refuse("num_target_layers", args.num_target_layers, f"the target has {depth} layers")
    if args.target_layer_ids[-1] >= depth:
        refuse("target_layer_ids", args.target_layer_ids, f"the target has layers 0 to {depth - 1}")
    if abs(args.vocab_size - vocab) > MAX_VOCAB_PADDING:
        refuse("vocab_size", args.vocab_size, f"the target's is {vocab}")
    if args.selector_top_k > vocab:
        refuse("selector_top_k", args.selector_top_k, f"the target has {vocab} tokens")
    if args.mask_token_id >= vocab:
        refuse("mask_token_id", args.mask_token_id, f"the target embeds ids below {vocab}")
