"""Whether a drafter fits a target: one check, made before anything is decoded."""

from typing import Any, NoReturn

from ..targets.shape import TargetShape
from .args import DrafterArgs

# Heads are padded to different multiples by different exports of one vocabulary.
MAX_VOCAB_PADDING = 1024


def check_fit(args: DrafterArgs, shape: TargetShape) -> None:
    """Refuse a drafter that was made for another target.

    A mismatch would not crash: it would only draft badly, so it is an error here.

    Raises:
        ValueError: naming the field, the drafter's value and the target's.
    """

    def refuse(name: str, found: Any, allowed: str) -> NoReturn:
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
