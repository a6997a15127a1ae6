"""Many blocks of several texts in one pass of the drafter."""

from typing import NamedTuple

import mlx.core as mx

from ..drafter.context import BlockRows, Context
from ..drafter.model import Drafter
from ..targets import TargetHead


class Masks(NamedTuple):
    """What is added to scores: 0 where a row sees a key, minus infinity elsewhere.

    Attributes:
        context (mx.array): [N, A, L or 1, S].
        block (mx.array, optional): [L, L]; ``None`` where a row sees its whole block.
    """

    context: mx.array
    block: mx.array | None


class TextsContext(Context):
    """The context of blocks that begin anywhere in their texts.

    A block sees the rows of its text strictly before its anchor, as in decoding: the anchor's own
    taps are not known there. Rows of padding, after a text, are never seen.

    Args:
        drafter (Drafter): The drafter.
        taps (mx.array): [N, S, T * H], of texts that begin at position 0.
        anchors (mx.array): Positions [N, A] of the blocks' first rows.
    """

    def __init__(self, drafter: Drafter, taps: mx.array, anchors: mx.array) -> None:
        self.anchors, self.size = anchors, taps.shape[1]
        self.offset = anchors.flatten()
        # Keys and values [N, n_kv_heads, S, head_dim] of each layer.
        self.layers = drafter.context_rows(taps, 0)
        self._masks: dict[tuple, Masks] = {}

    def attend(self, layer: int, block: BlockRows) -> mx.array:
        """Attend from blocks [N * A, heads, L, head_dim] to their text and to themselves.

        A text's keys are multiplied with the queries of all its blocks at once, so they are not
        copied for each block.
        """
        text_keys, text_values = self.layers[layer]
        N, n_kv, S, D = text_keys.shape
        blocks, heads, L, _ = block.queries.shape
        A, rep = blocks // N, heads // n_kv
        mask = self._mask(L, block.window, block.causal)
        q = (block.queries * block.scale).reshape(N, A, n_kv, rep * L, D).transpose(0, 2, 1, 3, 4)
        k, v = (
            x.reshape(N, A, n_kv, L, D).transpose(0, 2, 1, 3, 4) for x in (block.keys, block.values)
        )
        context = q.reshape(N, n_kv, -1, D) @ text_keys.swapaxes(-1, -2)
        context = context.reshape(N, n_kv, A, rep, L, S).astype(mx.float32)
        context = context + mask.context[:, None, :, None]
        own = (q @ k.swapaxes(-1, -2)).reshape(N, n_kv, A, rep, L, L).astype(mx.float32)
        if mask.block is not None:
            own = own + mask.block
        context, own, total = _exponentials(context, own)
        context, own = context.astype(q.dtype), own.astype(q.dtype)
        out = context.reshape(N, n_kv, -1, S) @ text_values
        out = out.reshape(N, n_kv, A, rep * L, D) + own.reshape(N, n_kv, A, rep * L, L) @ v
        out = out / total.reshape(N, n_kv, A, rep * L, 1).astype(q.dtype)
        out = out.reshape(N, n_kv, A, rep, L, D).transpose(0, 2, 1, 3, 4, 5)
        return out.reshape(blocks, heads, L, D)

    def _mask(self, block_size: int, window: int | None, causal: bool) -> Masks:
        """Make what the rows of each block see, once for all layers that are alike."""
        key = block_size, window, causal
        if key not in self._masks:
            keys, rows = mx.arange(self.size), mx.arange(block_size)
            anchors = self.anchors[..., None, None]
            visible = keys < anchors
            if window is not None:
                visible = visible & (anchors + rows[:, None] - keys < window)
            own = _bias(rows[None] <= rows[:, None]) if causal else None
            self._masks[key] = Masks(_bias(visible), own)
        return self._masks[key]


def _exponentials(context: mx.array, own: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Take the numerators of one softmax over two arrays, and its denominator.

    The two are never joined: they are most of a training step's memory.
    """
    most = mx.maximum(context.max(-1, keepdims=True), own.max(-1, keepdims=True))
    most = mx.stop_gradient(most)
    context, own = mx.exp(context - most), mx.exp(own - most)
    return context, own, context.sum(-1, keepdims=True) + own.sum(-1, keepdims=True)


def _bias(visible: mx.array) -> mx.array:
    return mx.where(visible, 0.0, -mx.inf)


def run_blocks(
    drafter: Drafter,
    target: TargetHead,
    tokens: mx.array,
    taps: mx.array,
    anchors: mx.array,
    block_size: int | None = None,
) -> mx.array:
    """Run the block at every anchor from the true text before it.

    Args:
        drafter (Drafter): The drafter.
        target (TargetHead): Its target.
        tokens (mx.array): Ids [N, S] of the texts.
        taps (mx.array): Their taps, [N, S, T * H].
        anchors (mx.array): Positions [N, A].
        block_size (int, optional): Rows L of a block. Default: the drafter's own.

    Returns:
        mx.array: Rows 1 to L - 1 of each block after the final norm, [N, A, L - 1, H].
    """
    first = mx.take_along_axis(tokens, anchors, axis=1).flatten()
    context = TextsContext(drafter, taps, anchors)
    hidden = drafter.hidden_rows(target, first, context, block_size or drafter.block_size)
    return hidden.reshape(*anchors.shape, *hidden.shape[1:])
