"""Drafting for several sequences: a context each, and one pass of the drafter where it can."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, TypeGuard

import mlx.core as mx

from ...drafter.context import BlockRows, Context, DrafterContext, LayerContext, block_mask
from ...drafter.model import Drafter, Proposal, Proposer
from ...drafter.vocabulary import FrequentHead
from ...targets import Target
from ..clock import DRAFT, Clock
from ..judge import Judge


class StackedLayer:
    """One layer's contexts of several sequences, right-aligned, for a block after each."""

    def __init__(self, rows: Sequence[LayerContext]) -> None:
        self.rows, self.size = rows, max(len(row) for row in rows)

    def mask(self, block_size: int, window: int | None, causal: bool) -> mx.array | None:
        """Make the mask [B, 1, L, keys] that also hides the padding of shorter contexts."""
        visible = block_mask(self.size, block_size, window, causal)
        padding = [self.size - len(row) for row in self.rows]
        if not any(padding):
            return visible
        real = mx.arange(self.size + block_size) >= mx.array(padding)[:, None]
        real = real[:, None, None]
        return real if visible is None else visible & real

    def with_block(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Return every context followed by its row of a block [B, n_kv_heads, L, head_dim]."""
        none = keys[:1, :, :0], values[:1, :, :0]
        rows = [row.keys_and_values() if len(row) else none for row in self.rows]
        stacked = (mx.concatenate([self._pad(x) for x in side]) for side in zip(*rows, strict=True))
        keys, values = (
            mx.concatenate([*pair], axis=2) for pair in zip(stacked, (keys, values), strict=True)
        )
        return keys, values

    def _pad(self, x: mx.array) -> mx.array:
        return mx.pad(x, [(0, 0), (0, 0), (self.size - x.shape[2], 0), (0, 0)])


class StackedContext(Context):
    """Contexts of several sequences, read together by one pass of a :class:`Drafter`."""

    def __init__(self, contexts: Sequence[DrafterContext]) -> None:
        self.offset = mx.array([context.offset for context in contexts])
        layers = zip(*(context.layers for context in contexts), strict=True)
        self.layers = [StackedLayer(rows) for rows in layers]

    def attend(self, layer: int, block: BlockRows) -> mx.array:
        queries, keys, values, scale, window, causal = block
        stacked = self.layers[layer]
        mask = stacked.mask(queries.shape[2], window, causal)
        keys, values = stacked.with_block(keys, values)
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)


def takes_batches(proposer: Proposer) -> TypeGuard[Drafter]:
    """Whether it is a drafter whose rotation takes a position for each sequence."""
    if not isinstance(proposer, Drafter):
        return False
    kinds = (rope.get("rope_type", "default") for rope in proposer.args.rope_parameters)
    return "dynamic" not in kinds


def propose_rows(
    proposer: Proposer,
    head: Any,
    anchors: mx.array,
    contexts: Sequence[Any],
    block_size: int,
    judges: Sequence[Judge],
    histories: Sequence[mx.array | None],
    clock: Clock | None = None,
) -> list[Proposal]:
    """Draft a block for each of several sequences, in the order of their anchors [B].

    Sequences of one temperature share a pass of the drafter. Our own drafter is told what the
    judges' processors make of its logits. ``head`` is the target, or a part of its head.
    """
    timed: dict[str, Any] = {}
    if clock is not None and isinstance(proposer, Drafter):
        timed["on_block"] = partial(clock.lap, DRAFT)
    processed = _Processed(judges, histories, head)
    if len(judges) == 1 or not takes_batches(proposer):
        return [
            proposer.propose(
                head, anchor, context, block_size, judge.temperature, judge.draft_key(),
                **timed, **(processed.rows([b]) if isinstance(proposer, Drafter) else {}),
            )
            for b, (anchor, context, judge) in enumerate(
                zip(_each(anchors), contexts, judges, strict=True)
            )
        ]  # fmt: skip
    proposals: dict[int, Proposal] = {}
    for temperature in {judge.temperature for judge in judges}:
        rows = [b for b, judge in enumerate(judges) if judge.temperature == temperature]
        found = proposer.propose_rows(
            head,
            anchors if len(rows) == len(judges) else anchors[mx.array(rows)],
            StackedContext([contexts[b] for b in rows]),
            block_size,
            temperature,
            [judges[b].draft_key() for b in rows],
            **timed,
            **processed.rows(rows),
        )
        proposals |= dict(zip(rows, found, strict=True))
    return [proposals[b] for b in range(len(judges))]


class _Processed(NamedTuple):
    """What the processors of some sequences make of the drafter's logits."""

    judges: Sequence[Judge]
    histories: Sequence[mx.array | None]
    head: Target | FrequentHead

    def rows(self, which: Sequence[int]) -> dict[str, Any]:
        """The argument of :meth:`Drafter.propose` for these rows; none if nothing is processed."""
        if not any(self.judges[b].pure for b in which):
            return {}
        return {"process": partial(self._process, which)}

    def _process(self, which: Sequence[int], logits: mx.array) -> mx.array:
        # Processors name ids of the whole vocabulary.
        size = logits.shape[-1]
        columns = None if isinstance(self.head, Target) else self.head.draft_ids
        rows = list(logits)
        for row, b in enumerate(which):
            judge, history = self.judges[b], self.histories[b]
            if judge.pure and history is not None:
                wide = self._widened(rows[row], columns)
                processed = judge.process_drafts(wide, history)
                rows[row] = processed[:, :size] if columns is None else processed[:, columns]
        return mx.stack(rows)

    def _widened(self, rows: mx.array, columns: mx.array | None) -> mx.array:
        """Put rows into the columns of the whole vocabulary."""
        length, size = rows.shape
        if columns is None:
            padding = [(0, 0), (0, self.head.vocab_size - size)]
            return mx.pad(rows, padding, constant_values=-mx.inf)
        none = mx.full((length, self.head.vocab_size), -mx.inf)
        return mx.put_along_axis(none, columns[None], rows, axis=1)


def _each(anchors: mx.array) -> list[mx.array]:
    """Each anchor as an array [1]."""
    return [anchors[b : b + 1] for b in range(anchors.size)] if anchors.size > 1 else [anchors]


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
    if len(contexts) == 1 or taps is None or not takes_batches(proposer):
        for b, (context, position, keep) in enumerate(zip(contexts, positions, keeps, strict=True)):
            row_taps = None if taps is None else taps[b : b + 1, :keep]
            proposer.extend(context, tokens[b, :keep], row_taps, position)
        return
    layers = proposer.context_rows(taps, mx.array(list(positions)))
    for b, (context, position, keep) in enumerate(zip(contexts, positions, keeps, strict=True)):
        context.append([tuple(x[b : b + 1, :, :keep] for x in layer) for layer in layers], position)
