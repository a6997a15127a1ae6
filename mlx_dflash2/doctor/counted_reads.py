"""Bytes of weights that a round really reads, counted on the graph of a round."""

import io
import re
from collections import Counter
from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..decode.accept import accept_greedy
from ..drafter.model import Drafter
from ..targets import bind

# Primitives that take a part of their input.
_PARTS = ("Gather", "Split")
_EDGE = re.compile(r'"(\w+)" -> (\d+)')
_NODE = re.compile(r'(\d+) \[label ="(\w+)"')


def counted_reads(
    model: nn.Module,
    drafter: Drafter,
    prompt: Sequence[int],
    width: int,
    names_at_once: int = 1000,
) -> Counter:
    """How often each weight is read by a whole round; nothing of it is computed.

    Args:
        model (nn.Module): The target.
        drafter (Drafter): The drafter.
        prompt (sequence of int): At least two token ids, all but the last before the round.
        width (int): Rows that the target verifies.
        names_at_once (int): Weights to name in one drawing of the graph; MLX takes 1,024 at most.

    Returns:
        Counter: ``(name, whole)`` to a number of reads; ``whole`` is false where only some rows
        are looked up or a part is taken.
    """
    outputs, reads = _round(model, drafter, prompt, width), Counter()
    weights = list(parameters(model, drafter).items())
    for start in range(0, len(weights), names_at_once):
        names, arrays = zip(*weights[start : start + names_at_once], strict=True)
        labels = {f"weight{index}": name for index, name in enumerate(names)}
        text = io.StringIO()
        mx.export_to_dot(text, *outputs, **dict(zip(labels, arrays, strict=True)))
        kinds = dict(_NODE.findall(text.getvalue()))
        for source, node in _EDGE.findall(text.getvalue()):
            if source in labels:
                reads[labels[source], kinds[node] not in _PARTS] += 1
    return reads


def parameters(model: nn.Module, drafter: Drafter) -> dict[str, mx.array]:
    """All weights of a pair by name, the drafter's after ``drafter.``."""
    mine = tree_flatten(drafter.parameters())
    return dict(tree_flatten(model.parameters())) | {f"drafter.{name}": w for name, w in mine}


def counted_bytes(model: nn.Module, drafter: Drafter, prompt: Sequence[int], width: int) -> int:
    """Bytes of the weights that a round reads as a whole; parts of them are left out."""
    weights = parameters(model, drafter)
    reads = counted_reads(model, drafter, prompt, width)
    return sum(weights[name].nbytes * count for (name, whole), count in reads.items() if whole)


def _round(model: nn.Module, drafter: Drafter, prompt: Sequence[int], width: int) -> list[mx.array]:
    """The lazy results of one round, its context's new rows included."""
    target, layers = bind(model), drafter.target_layer_ids
    cache, context = target.make_cache(), drafter.make_context()
    tokens = mx.array(prompt, mx.uint32)
    before = target.forward(tokens[None, :-1], cache, layers)
    mx.eval(before.taps, [layer.state for layer in cache])
    drafter.extend(context, tokens[:-1], before.taps, 0)
    proposal = drafter.propose(target, tokens[-1:], context, drafter.block_size)
    inputs = mx.concatenate([tokens[-1:], proposal.tokens[: width - 1].astype(mx.uint32)])
    out = target.forward(inputs[None], cache, layers, record=True)
    verdict = accept_greedy(inputs[1:], target.logits(out.hidden)[0])
    states = [value for layer in cache for _, value in tree_flatten(layer.state)]
    arrays = [value for value in states if isinstance(value, mx.array)]
    return [*verdict, out.taps, *context.state, *arrays]
