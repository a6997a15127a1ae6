"""Count the bytes of weights that a round really reads, on the graph of a round."""

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
) -> Counter[tuple[str, bool]]:
    """Count how often a whole round reads each weight; the round is not computed.

    Args:
        model (nn.Module): The target.
        drafter (Drafter): The drafter.
        prompt (sequence of int): At least two token ids, all but the last before the round.
        width (int): Rows that the target verifies.
        names_at_once (int): Weights to name in one drawing of the graph; MLX takes 1,024 at most.

    Returns:
        Counter: The number of reads by ``(name, whole)``; ``whole`` is false where only some rows
        are looked up or a part is taken.
    """
    outputs, reads = _round(model, drafter, prompt, width), Counter[tuple[str, bool]]()
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
    """Return all weights of a pair by name, the drafter's after ``drafter.``."""
    mine = dict(tree_flatten(drafter.parameters()))
    return dict(tree_flatten(model.parameters())) | {f"drafter.{k}": w for k, w in mine.items()}


def counted_bytes(model: nn.Module, drafter: Drafter, prompt: Sequence[int], width: int) -> int:
    """Count the bytes of the weights that a round reads whole; parts are left out."""
    weights = parameters(model, drafter)
    reads = counted_reads(model, drafter, prompt, width)
    return sum(weights[name].nbytes * count for (name, whole), count in reads.items() if whole)


def _round(model: nn.Module, drafter: Drafter, prompt: Sequence[int], width: int) -> list[mx.array]:
    """Build the lazy results of one round, its context's new rows included."""
    stream, tokens = mx.default_stream(mx.default_device()), mx.array(list(prompt), mx.uint32)
    loop = Loop(
        model, drafter, stream, Stats(), kv_quantization=KVQuantization(), verify_width=width
    )
    sequence = loop.open(Judge())
    decision = loop.prefill(sequence, tokens[:-1], tokens.size)
    # The round starts from the prompt's last token, whatever the target would have chosen.
    decision.tokens, decision.taken = [prompt[-1]], 1
    loop.settle()
    round_ = loop.launch([sequence], sequence.caches, [width], lazy=True)
    host, _ = sequence.judge.at_once(round_.proposals[0], round_.rows_of_logits[0], None)
    states = dict(tree_flatten([layer.state for layer in sequence.caches]))
    results = [host, round_.out.taps, *sequence.context_state, *states.values()]
    return [value for value in results if isinstance(value, mx.array)]
