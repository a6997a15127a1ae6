"""What the drafter remembers of the committed tokens: keys and values by absolute position."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import mlx.core as mx

KeysAndValues = tuple[mx.array, mx.array]


class BlockRows(NamedTuple):
    """A block's rows in one layer, and what they may see.

    Attributes:
        queries (mx.array): [B, n_heads, L, head_dim].
        keys (mx.array): [B, n_kv_heads, L, head_dim].
        values (mx.array): [B, n_kv_heads, L, head_dim].
        scale (float): Factor of the scores.
        window (int, optional): A row at position t sees the context at s if t - s < window.
        causal (bool): Whether a row sees only those rows of its block that are not after it.
    """

    queries: mx.array
    keys: mx.array
    values: mx.array
    scale: float
    window: int | None
    causal: bool


class Context(Protocol):
    """The committed rows before a block, as the drafter's forward reads them.

    Attributes:
        offset (int or mx.array): Absolute position of the block's first row, the anchor; an array
            [B] where blocks begin at different positions.
    """

    offset: int | mx.array

    def attend(self, layer: int, block: BlockRows) -> mx.array:
        """Attend from a block to the context and to itself, in the drafter's layer ``layer``.

        The context stays as it is. Returns [B, n_heads, L, head_dim].
        """


class LayerContext:
    """One layer's context keys and values, in order of position.

    Args:
        size (int, optional): Rows to keep. Default: ``None``, all of them.
    """

    step = 256

    def __init__(self, size: int | None = None) -> None:
        self.size = size
        # Keys and values with room for more rows; empty before the first rows.
        self._buffers: list[mx.array] = []
        self._begin = self._end = 0

    def __len__(self) -> int:
        return self._end - self._begin

    @property
    def state(self) -> list[mx.array]:
        return self._buffers

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Add rows [B, n_kv_heads, S, head_dim]; the oldest beyond ``size`` are forgotten."""
        if self.size is not None:
            keys, values = keys[:, :, -self.size :], values[:, :, -self.size :]
        self._write(keys, values)
        self._end += keys.shape[2]
        if self.size is not None:
            self._begin = max(self._begin, self._end - self.size)

    def keys_and_values(self) -> KeysAndValues:
        """Return the rows held, [B, n_kv_heads, S, head_dim] each."""
        return self._rows(self._end)

    def drop(self, count: int) -> None:
        """Forget the newest rows; those that had to make room for them do not come back."""
        self._end = max(self._begin, self._end - count)

    def with_block(self, keys: mx.array, values: mx.array) -> KeysAndValues:
        """Return the context followed by a block's rows, which are not kept."""
        self._write(keys, values)
        return self._rows(self._end + keys.shape[2])

    def _rows(self, end: int) -> KeysAndValues:
        keys, values = self._buffers
        return keys[:, :, self._begin : end], values[:, :, self._begin : end]

    def _write(self, *new: mx.array) -> None:
        count = new[0].shape[2]
        if not self._buffers or self._end + count > self._buffers[0].shape[2]:
            held = self.keys_and_values() if self._buffers else None
            self._buffers = [self._with_room(x, held and held[i]) for i, x in enumerate(new)]
            self._begin, self._end = 0, len(self)
        for buffer, rows in zip(self._buffers, new, strict=True):
            buffer[:, :, self._end : self._end + count] = rows

    def _with_room(self, new: mx.array, held: mx.array | None) -> mx.array:
        B, n_kv_heads, S, head_dim = new.shape
        room = (S + self.step - 1) // self.step * self.step + self.step
        empty = mx.zeros((B, n_kv_heads, room, head_dim), new.dtype)
        return empty if held is None else mx.concatenate([held, empty], axis=2)


class DrafterContext(Context):
    """The context of all layers for one sequence.

    Args:
        sizes (list): For each layer the rows that it can see, or ``None`` for all.

    Attributes:
        offset (int): Absolute position after the last row, that is, of the next anchor.
    """

    offset: int

    def __init__(self, sizes: list[int | None]) -> None:
        self.layers = [LayerContext(size) for size in sizes]
        self.offset = 0
        self._masks: dict[tuple, mx.array | None] = {}

    def attend(self, layer: int, block: BlockRows) -> mx.array:
        queries, keys, values, scale, window, causal = block
        mask = self.mask(layer, queries.shape[2], window, causal)
        keys, values = self.layers[layer].with_block(keys, values)
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)

    def mask(
        self, layer: int, block_size: int, window: int | None, causal: bool
    ) -> mx.array | None:
        """Make :func:`block_mask` for a layer, once for each length of the context."""
        key = len(self.layers[layer]), block_size, window, causal
        if key not in self._masks:
            # Layers differ in window; lengths of earlier rounds do not come back.
            same = {k: mask for k, mask in self._masks.items() if k[0] == key[0]}
            self._masks = same | {key: block_mask(*key)}
        return self._masks[key]

    def seek(self, position: int) -> None:
        """Continue at an absolute position; rows before a gap are out of order and are dropped."""
        if position != self.offset:
            self.layers = [LayerContext(layer.size) for layer in self.layers]
            self.offset = position

    def trim_to(self, position: int) -> None:
        """Forget the rows from an absolute position on."""
        if position < self.offset:
            for layer in self.layers:
                layer.drop(self.offset - position)
            self.offset = position

    def append(self, rows: Sequence[KeysAndValues], position: int) -> None:
        """Add each layer's keys and values of rows that begin at an absolute position."""
        self.seek(position)
        # The position is unknown until every layer has the rows.
        self.offset = -1
        for layer, (keys, values) in zip(self.layers, rows, strict=True):
            layer.append(keys, values)
        self.offset = position + rows[0][0].shape[2]

    @property
    def state(self) -> list[mx.array]:
        return [array for layer in self.layers for array in layer.state]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.state)


def block_mask(
    num_context: int, block_size: int, window: int | None, causal: bool
) -> mx.array | None:
    """Make the mask of a block's rows over the keys of context and block, in that order.

    A row at position t sees a context key at s if ``t - s < window``. It sees every row of its
    block, or with ``causal`` those up to itself.

    Returns:
        mx.array or None: Booleans [block_size, num_context + block_size]; ``None`` for all true.
    """
    if not causal and (window is None or num_context + block_size <= window):
        return None
    rows = mx.arange(block_size)[:, None]
    keys = mx.arange(-num_context, block_size)[None]
    visible = mx.ones((block_size, num_context + block_size), dtype=mx.bool_)
    if window is not None:
        visible = (keys >= 0) | (rows - keys < window)
    return visible & (keys <= rows) if causal else visible
