"""Bytes of weights that a round really reads, counted on the graph of a round."""

import io
import re
from collections import Counter
from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..decode.judge import Judge
from ..decode.kv_quantization import KVQuantization
from ..decode.loop import Loop
from ..decode.stats import Stats
from ..drafter.model import Drafter

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
    stream, tokens = mx.default_stream(mx.default_device()), mx.array(prompt, mx.uint32)
    loop = Loop(
        model, drafter, stream, Stats(), kv_quantization=KVQuantization(), verify_width=width
    )
    sequence = loop.open(Judge())
    decision = loop.prefill(sequence, tokens[:-1], tokens.size)
    # The round begins from the prompt's last token, whatever the target would have chosen.
    decision.tokens, decision.taken = [prompt[-1]], 1
    loop.settle()
    round_ = loop.launch([sequence], sequence.caches, [width])
    host, _ = sequence.judge.at_once(round_.proposals[0], round_.rows_of_logits[0], None)
    states = [value for layer in sequence.caches for _, value in tree_flatten(layer.state)]
    arrays = [value for value in states if isinstance(value, mx.array)]
    return [host, round_.out.taps, *sequence.context_state, *arrays]
