"""Compile and try what rounds launch before the first of them is timed."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..drafter.model import Drafter
from ..kernels import first_time
from ..targets import Target
from .judge import Judge


def warm_up(
    target: Target,
    drafter: Drafter,
    stream: Any,
    block_size: int,
    widths: Sequence[int],
) -> bool:
    """Run one small round of a pair for nothing, once in a process.

    MLX compiles its kernels when they are first launched, and this package tries its own then.

    Args:
        target (Target): The target.
        drafter (Drafter): The drafter.
        stream: Where rounds are computed.
        block_size (int): Rows of the drafter's block.
        widths (sequence of int): Rows of the passes to run.

    Returns:
        bool: Whether this was the first time.
    """
    key = (type(target), target.shape, repr(drafter.args), drafter.dtype, block_size)
    if not first_time(key):
        return False
    cache, context = target.make_cache(), drafter.make_context()
    position = 0
    with mx.stream(stream):
        for width in widths:
            tokens = mx.zeros((1, width), mx.uint32)
            layers = drafter.target_layer_ids
            out = target.forward(tokens, cache, layers, record=width > 1)
            drafter.extend(context, tokens[0], out.taps, position)
            position += width
            proposal = drafter.propose(target, tokens[0, :1], context, block_size)
            rows = target.logits(out.hidden)[0]
            mx.eval(Judge().at_once(proposal.first(width - 1), rows, None)[0])
    return True
