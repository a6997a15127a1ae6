"""Many blocks of several texts in one pass of the drafter."""

from typing import Any, NamedTuple

import mlx.core as mx

from ..drafter.model import Drafter


class Masks(NamedTuple):
    """What is added to scores, 0 where a block's row sees a key and minus infinity elsewhere.

    ``context`` [N, A, L or 1, S], and ``block`` [L, L], or ``None`` where it sees all own rows.
    """

    context: mx.array
    block: mx.array | None


class BlockLayer:
    """One layer's context keys and values [N, n_kv_heads, S, head_dim] of N texts."""

    def __init__(self, keys: mx.array, values: mx.array):
        self.keys, self.values = keys, values

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Masks
    ) -> mx.array:
        """Attention of blocks [N * A, heads, L, head_dim] to their text and to themselves.

        A text's keys are multiplied with the queries of all its blocks at once, so they are not
        copied for each block.
        """
        N, n_kv, S, D = self.keys.shape
        blocks, heads, L, _ = queries.shape
        A, rep = blocks // N, heads // n_kv
        q = (queries * scale).reshape(N, A, n_kv, rep * L, D).transpose(0, 2, 1, 3, 4)
        k, v = (x.reshape(N, A, n_kv, L, D).transpose(0, 2, 1, 3, 4) for x in (keys, values))
        context = q.reshape(N, n_kv, -1, D) @ self.keys.swapaxes(-1, -2)
        context = context.reshape(N, n_kv, A, rep, L, S).astype(mx.float32)
        context = context + mask.context[:, None, :, None]
        block = (q @ k.swapaxes(-1, -2)).reshape(N, n_kv, A, rep, L, L).astype(mx.float32)
        if mask.block is not None:
            block = block + mask.block
        # One softmax over both, which are never joined: they are most of a step's memory.
        most = mx.maximum(context.max(-1, keepdims=True), block.max(-1, keepdims=True))
        most = mx.stop_gradient(most)
        context, block = mx.exp(context - most), mx.exp(block - most)
        total = context.sum(-1, keepdims=True) + block.sum(-1, keepdims=True)
        context, block = (x.astype(q.dtype) for x in (context, block))
        out = context.reshape(N, n_kv, -1, S) @ self.values
        out = out.reshape(N, n_kv, A, rep * L, D) + block.reshape(N, n_kv, A, rep * L, L) @ v
        out = out / total.reshape(N, n_kv, A, rep * L, 1).astype(q.dtype)
        out = out.reshape(N, n_kv, A, rep, L, D).transpose(0, 2, 1, 3, 4, 5)
        return out.reshape(blocks, heads, L, D)


class BlockContext:
    """The context of blocks that begin anywhere in their texts, as a drafter's pass reads it.

    A block sees the rows of its text strictly before its anchor, as when decoding: the anchor's
    own taps are not known there. Rows of padding, behind a text, are never seen.

    Args:
        drafter (Drafter): The drafter.
        taps (mx.array): [N, S, T * H], of texts that begin at position 0.
        anchors (mx.array): Positions [N, A] of the blocks' first rows.
    """

    def __init__(self, drafter: Drafter, taps: mx.array, anchors: mx.array):
        self.anchors, self.size = anchors, taps.shape[1]
        self.offset = anchors.flatten()
        self.layers = [BlockLayer(*rows) for rows in drafter.context_rows(taps, 0)]
        self._masks: dict[tuple, Masks] = {}

    def mask(self, index: int, block_size: int, window: int | None, causal: bool) -> Masks:
        """What the rows of each block see in a layer."""
        key = block_size, window, causal
        if key not in self._masks:
            self._masks[key] = self._make_mask(*key)
        return self._masks[key]

    def _make_mask(self, block_size: int, window: int | None, causal: bool) -> Masks:
        keys, rows = mx.arange(self.size), mx.arange(block_size)
        anchors = self.anchors[..., None, None]
        visible = keys < anchors
        if window is not None:
            visible = visible & (anchors + rows[:, None] - keys < window)
        own = _bias(rows[None] <= rows[:, None]) if causal else None
        return Masks(_bias(visible), own)


def _bias(visible: mx.array) -> mx.array:
    return mx.where(visible, 0.0, -mx.inf)


def run_blocks(
    drafter: Drafter,
    target: Any,
    tokens: mx.array,
    taps: mx.array,
    anchors: mx.array,
    block_size: int | None = None,
) -> mx.array:
    """Rows 1 to L - 1 of the block at every anchor, from the true text before it.

    L is ``block_size``, or the drafter's own where that is ``None``.

    Shapes:
      - tokens: [N, S] ids; taps: [N, S, T * H]; anchors: [N, A] positions
    Returns:
      - hidden: [N, A, L - 1, H] after the final norm
    """
    N, A = anchors.shape
    first = mx.take_along_axis(tokens, anchors, axis=1).reshape(-1, 1)
    length = (block_size or drafter.block_size) - 1
    masks = mx.full((N * A, length), drafter.args.mask_token_id, tokens.dtype)
    block = mx.concatenate([first, masks], axis=1)
    hidden = drafter(target.embed(block), BlockContext(drafter, taps, anchors))
    return hidden.reshape(N, A, *hidden.shape[1:])
