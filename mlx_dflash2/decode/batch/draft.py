"""Drafting for several sequences: a context each, and one pass of the drafter where it can."""

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeGuard

import mlx.core as mx

from ...copies import CopyProposer
from ...drafter.context import BlockAttention, DrafterContext, LayerContext, block_mask
from ...drafter.model import Drafter, Proposal, Proposer
from ...targets import Target
from ..clock import DRAFT, Clock
from ..judge import Judge


class StackedLayer(BlockAttention):
    """One layer's contexts of several sequences, right-aligned, for a block after each."""

    def __init__(self, rows: Sequence[LayerContext]):
        self.rows, self.size = rows, max(len(row) for row in rows)

    def mask(self, block_size: int, window: int | None, causal: bool) -> mx.array | None:
        """As a single layer's, [B, 1, L, keys], with the padding of shorter contexts hidden."""
        visible = block_mask(self.size, block_size, window, causal)
        padding = [self.size - len(row) for row in self.rows]
        if not any(padding):
            return visible
        real = mx.arange(self.size + block_size) >= mx.array(padding)[:, None]
        real = real[:, None, None]
        return real if visible is None else visible & real

    def with_block(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Every context followed by its row of a block [B, n_kv_heads, L, head_dim]."""
        none = keys[:1, :, :0], values[:1, :, :0]
        rows = [row.keys_and_values() if len(row) else none for row in self.rows]
        stacked = (mx.concatenate([self._pad(x) for x in side]) for side in zip(*rows, strict=True))
        keys, values = (
            mx.concatenate(pair, axis=2) for pair in zip(stacked, (keys, values), strict=True)
        )
        return keys, values

    def _pad(self, x: mx.array) -> mx.array:
        return mx.pad(x, [(0, 0), (0, 0), (self.size - x.shape[2], 0), (0, 0)])


class StackedContext:
    """Contexts of several sequences, read together by one pass of a :class:`Drafter`."""

    def __init__(self, contexts: Sequence[DrafterContext]):
        self.offset = mx.array([context.offset for context in contexts])
        layers = zip(*(context.layers for context in contexts), strict=True)
        self.layers = [StackedLayer(rows) for rows in layers]

    def mask(self, index: int, block_size: int, window: int | None, causal: bool):
        """As a single context's."""
        return self.layers[index].mask(block_size, window, causal)


def takes_batches(proposer: Proposer) -> TypeGuard[Drafter]:
    """Whether it is a drafter whose rotation takes a position for each sequence."""
    if not isinstance(proposer, Drafter):
        return False
    kinds = (rope.get("rope_type", "default") for rope in proposer.args.rope_parameters)
    return "dynamic" not in kinds


def propose_rows(
    proposer: Proposer,
    target: Target,
    anchors: Sequence[int],
    contexts: Sequence[Any],
    block_size: int,
    most: Sequence[int],
    judges: Sequence[Judge],
    clock: Clock | None = None,
) -> list[Proposal]:
    """Draft a block for each of several sequences, in the order of their anchors.

    Sequences of one temperature share a pass of the drafter. Those that copy take no part in it;
    their drafts are at most as many as ``most`` says, whatever the block.
    """
    if isinstance(proposer, CopyProposer):
        return _copy_or_draft(proposer, target, anchors, contexts, block_size, most, judges, clock)
    timed: dict[str, Any] = {}
    if clock is not None and isinstance(proposer, Drafter):
        timed["on_block"] = partial(clock.lap, DRAFT)
    if len(judges) == 1 or not takes_batches(proposer):
        return [
            proposer.propose(
                target,
                mx.array([anchor], mx.uint32),
                context,
                block_size,
                judge.temperature,
                judge.draft_key(),
                **timed,
            )
            for anchor, context, judge in zip(anchors, contexts, judges, strict=True)
        ]
    proposals: dict[int, Proposal] = {}
    for temperature in {judge.temperature for judge in judges}:
        rows = [b for b, judge in enumerate(judges) if judge.temperature == temperature]
        found = proposer.propose_rows(
            target,
            mx.array([anchors[b] for b in rows], mx.uint32),
            StackedContext([contexts[b] for b in rows]),
            block_size,
            temperature,
            [judges[b].draft_key() for b in rows],
            **timed,
        )
        proposals |= dict(zip(rows, found, strict=True))
    return [proposals[b] for b in range(len(judges))]


def _copy_or_draft(
    proposer: CopyProposer,
    target: Target,
    anchors: Sequence[int],
    contexts: Sequence[Any],
    block_size: int,
    most: Sequence[int],
    judges: Sequence[Judge],
    clock: Clock | None,
) -> list[Proposal]:
    """Copies where they promise more, and the drafter's blocks for the other sequences."""
    rows = zip(contexts, anchors, most, strict=True)
    proposals = dict(enumerate(proposer.copy(*row, block_size) for row in rows))
    left = [b for b, proposal in proposals.items() if proposal is None]
    if left and proposer.drafter is not None:
        found = propose_rows(
            proposer.drafter,
            target,
            [anchors[b] for b in left],
            [contexts[b].inner for b in left],
            block_size,
            [most[b] for b in left],
            [judges[b] for b in left],
            clock,
        )
        proposals |= dict(zip(left, found, strict=True))
    return list(proposals.values())


def extend_rows(
    proposer: Proposer,
    contexts: Sequence[Any],
    tokens: mx.array,
    taps: mx.array | None,
    positions: Sequence[int],
    keeps: Sequence[int],
) -> None:
    """Hand each sequence's committed rows to its context.

    Args:
        proposer (Proposer): The drafter.
        contexts (sequence): One a sequence.
        tokens (mx.array): Ids [B, W] of a pass.
        taps (mx.array, optional): The pass's taps [B, W, T * H].
        positions (sequence): Absolute position of each sequence's first row.
        keeps (sequence): How many of its rows each sequence keeps.
    """
    if isinstance(proposer, CopyProposer):
        if proposer.drafter is not None:
            inner = [context.inner for context in contexts]
            extend_rows(proposer.drafter, inner, tokens, taps, positions, keeps)
        return
    if len(contexts) == 1 or not takes_batches(proposer):
        for b, (context, position, keep) in enumerate(zip(contexts, positions, keeps, strict=True)):
            row_taps = None if taps is None else taps[b : b + 1, :keep]
            proposer.extend(context, tokens[b, :keep], row_taps, position)
        return
    layers = proposer.context_rows(taps, mx.array(list(positions)))
    for b, (context, position, keep) in enumerate(zip(contexts, positions, keeps, strict=True)):
        context.append([tuple(x[b : b + 1, :, :keep] for x in layer) for layer in layers], position)
