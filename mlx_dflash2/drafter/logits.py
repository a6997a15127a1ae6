"""The drafter's logits: which ids may be drafted, and how their raw values are transformed."""

from collections.abc import Callable

import mlx.core as mx

from ..kernels import top_k
from ..kernels.top_k import transform_logits
from ..targets.shape import TargetHead
from .args import DrafterArgs

Process = Callable[[mx.array], mx.array]
_FORBIDDEN = 1e9


def drafted_vocab_size(target: TargetHead, args: DrafterArgs) -> int:
    """Return how many ids may be drafted; they are the first ones of the vocabulary."""
    limits = (target.vocab_size, args.vocab_size, args.selector_vocab_size)
    return min(limit for limit in limits if limit)


def draft_logits(target: TargetHead, hidden: mx.array, args: DrafterArgs) -> mx.array:
    """Compute raw logits [..., V] of the ids that may be drafted, from hidden rows [..., H]."""
    return target.head(hidden)[..., : drafted_vocab_size(target, args)]


def transform(logits: mx.array, args: DrafterArgs) -> mx.array:
    """Apply the drafter's multiplier and soft cap to raw logits, in float32."""
    return transform_logits(logits, args.output_multiplier, args.final_logit_softcapping)


def best_tokens(
    logits: mx.array, k: int, args: DrafterArgs, process: Process | None = None
) -> tuple[mx.array, mx.array]:
    """Find the ``k`` best ids of each row of raw logits [..., V], the best first.

    Args:
        logits (mx.array): Raw logits.
        k (int): How many.
        args (DrafterArgs): How logits are transformed.
        process (callable, optional): Changes transformed logits before the best are found.

    Returns:
        tuple of mx.array: Their transformed logits [..., k], float32, and the ids [..., k].
    """
    if process is not None:
        # What is forbidden stays a number, so that pair scores stay numbers.
        processed = mx.clip(process(transform(logits, args)), -_FORBIDDEN, _FORBIDDEN)
        return top_k(processed, k)
    return top_k(logits, k, args.output_multiplier, args.final_logit_softcapping)
