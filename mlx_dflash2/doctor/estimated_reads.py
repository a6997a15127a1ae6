"""Bytes that a round reads, estimated from a pair's modules; none of their weights is evaluated."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import ArraysCache
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from ..blas.measure import has_slow_blas
from ..drafter.model import Drafter
from ..evaluation.machine import num_bytes
from ..targets import Target
from .products import Gpu

_TABLES = (nn.Embedding, nn.QuantizedEmbedding)
_EXPERTS = (SwitchLinear, QuantizedSwitchLinear)


@dataclass(frozen=True)
class Reads:
    """Bytes that a round or a plain step reads.

    ``target`` and ``head`` are weights of the verify pass, ``drafter`` and ``draft_head`` those of
    the draft; ``cache`` and ``context`` are the target's and the drafter's past.
    """

    target: int
    head: int
    cache: int = 0
    drafter: int = 0
    draft_head: int = 0
    context: int = 0

    @property
    def weights(self) -> int:
        return self.target + self.head + self.drafter + self.draft_head

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.context


@dataclass(frozen=True)
class TargetBytes:
    """Bytes of a target, by when they are read.

    Attributes:
        always: Weights that every pass reads.
        row: Of all embedding tables, what one token looks up.
        head: The head's weights.
        experts: Of each stack of experts, its bytes and the share of it that one row chooses.
        layers: Of each layer's keys and values, a token's bytes and the window, if there is one.
        states: Recurrent states, whose size is fixed.
        number: One number of the activations.
    """

    always: int
    row: int
    head: int
    experts: list[tuple[int, float]]
    layers: list[tuple[int, int | None]]
    states: int
    number: int

    def weights(self, rows: int) -> int:
        """Return what a pass over ``rows`` rows reads of the weights, without the head."""
        # Rows choose experts at random, as far as one can tell beforehand.
        chosen = sum(size * (1 - (1 - share) ** rows) for size, share in self.experts)
        return self.always + self.row * rows + int(chosen)

    def past(self, tokens: int) -> int:
        """Return what a pass reads of the caches after ``tokens`` tokens."""
        kept = sum(size * min(tokens, window or tokens) for size, window in self.layers)
        return kept + self.states


def target_bytes(target: Target) -> TargetBytes:
    """Ask a target, which may be lazily loaded, for its sizes.

    One row is run through it to see the shapes of its caches and the experts it chooses. The
    pass is never evaluated.
    """
    caches = target.make_cache()
    with _counted_experts(target.model) as experts:
        hidden = target.forward(mx.zeros((1, 1), mx.uint32), caches).hidden
    modules = dict(target.model.named_modules())
    always = row = 0
    for name, value in dict(tree_flatten(target.model.parameters())).items():
        path = name.rpartition(".")[0]
        module = modules.get(path)
        if isinstance(module, _TABLES):
            row += value.nbytes // value.shape[0]
        elif path not in experts and module is not target.head_module:
            always += value.nbytes
    shares = [(num_bytes(e.matrix), e.chosen / e.matrix.num_experts) for e in experts.values()]
    layers, states = [], 0
    for cache in caches:
        if isinstance(cache, ArraysCache):
            states += cache.nbytes
        else:
            keys, values = cache.keys_and_values()
            layers.append((keys.nbytes + values.nbytes, getattr(cache, "max_size", None)))
    head = num_bytes(target.head_module)
    return TargetBytes(always, row, head, shares, layers, states, hidden.dtype.size)


class _CountedExperts(nn.Module):
    """A stack of experts that remembers how many of them a pass chose."""

    def __init__(self, matrix: nn.Module) -> None:
        super().__init__()
        self.matrix, self.chosen = matrix, 0

    def __call__(self, x: mx.array, indices: mx.array, **kwargs: Any) -> mx.array:
        self.chosen = indices.size
        return self.matrix(x, indices, **kwargs)


@contextmanager
def _counted_experts(model: nn.Module) -> Iterator[dict[str, _CountedExperts]]:
    """Count the experts that a model chooses; afterwards the model is as it was."""
    found = {path: module for path, module in model.named_modules() if isinstance(module, _EXPERTS)}
    counted = {path: _CountedExperts(module) for path, module in found.items()}
    model.update_modules(tree_unflatten(list(counted.items())))
    try:
        yield counted
    finally:
        model.update_modules(tree_unflatten(list(found.items())))


def drafter_reads(drafter: Drafter) -> int:
    """Return the bytes of the weights that one draft reads, its context's new rows included."""
    args, length = drafter.args, drafter.block_size - 1
    rows = {
        "predecessor_codebook": 1 + (length - 1) * args.selector_top_k,
        "successor_codebook": length * args.selector_top_k,
    }
    if args.has_selector and "scales" in drafter.candidate_selector.predecessor_codebook:
        # Quantized tables are unpacked for the anchor and all candidates alike.
        rows = dict.fromkeys(rows, 1 + length * args.selector_top_k)
    total = 0
    for name, value in dict(tree_flatten(drafter.parameters())).items():
        table = next((count for part, count in rows.items() if part in name), None)
        if table is not None:
            total += value.nbytes // value.shape[0] * table
        elif any(part in name for part in (".k_proj.", ".v_proj.", ".k_norm.")):
            # Once for the context's new rows, once for the block.
            total += 2 * value.nbytes
        else:
            total += value.nbytes
    return total


def context_bytes(drafter: Drafter, tokens: int) -> int:
    """Return the bytes of a drafter's context after ``tokens`` tokens."""
    windows = (layer.self_attn.window for layer in drafter.layers)
    kept = sum(tokens if window is None else min(tokens, window - 1) for window in windows)
    args = drafter.args
    return kept * 2 * args.num_key_value_heads * args.head_dim * drafter.dtype.size


def slowdown(model: nn.Module, rows: int, gpu: Gpu | None, own: bool = False) -> float:
    """Return what a pass over ``rows`` rows takes of a model's products, in times of one row's.

    Args:
        model (nn.Module): Its first quantized matrix tells how it is quantized.
        rows (int): From 1.
        gpu (Gpu, optional): ``None`` for MLX's CPU backend, whose quantized product takes the rows
            one by one, as does the BLAS of MLX's wheel for Linux.
    """
    packed = next((m for m in model.modules() if "scales" in m), None)
    if gpu is not None:
        size = 2.0 if packed is None else packed.bits / 8 + 4 / packed.group_size
        return gpu.slowdown(rows, size, own and packed is not None)
    return rows if packed is not None or has_slow_blas() else 1
