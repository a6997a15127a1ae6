"""What the drafter remembers of the committed tokens: keys and values by absolute position."""

from collections.abc import Sequence

import mlx.core as mx


class BlockAttention:
    """Attention for whatever puts a block's keys and values behind a context's."""

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: mx.array | None,
    ) -> mx.array:
        """Attention of a block's rows [B, heads, L, head_dim] to the context and to themselves."""
        keys, values = self.with_block(keys, values)
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)


class LayerContext(BlockAttention):
    """One layer's context keys and values, in order of position.

    Args:
        size (int, optional): Rows to keep. Default: ``None``, all of them.
    """

    step = 256

    def __init__(self, size: int | None = None):
        self.size = size
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self._begin = self._end = 0

    def __len__(self) -> int:
        return self._end - self._begin

    def append(self, keys: mx.array, values: mx.array):
        """Add rows [B, n_kv_heads, S, head_dim]; the oldest beyond ``size`` are forgotten."""
        if self.size is not None:
            keys, values = keys[:, :, -self.size :], values[:, :, -self.size :]
        self._write(keys, values)
        self._end += keys.shape[2]
        if self.size is not None:
            self._begin = max(self._begin, self._end - self.size)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """The rows held, [B, n_kv_heads, S, head_dim] each."""
        rows = slice(self._begin, self._end)
        return self.keys[:, :, rows], self.values[:, :, rows]

    def drop(self, count: int):
        """Forget the newest rows; those that had to make room for them do not come back."""
        self._end = max(self._begin, self._end - count)

    def with_block(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """The context followed by a block's rows, which are not kept."""
        self._write(keys, values)
        end = self._end + keys.shape[2]
        return self.keys[:, :, self._begin : end], self.values[:, :, self._begin : end]

    def _write(self, keys: mx.array, values: mx.array):
        start, stop = self._end, self._end + keys.shape[2]
        if self.keys is None or stop > self.keys.shape[2]:
            self.keys = self._grow(self.keys, keys)
            self.values = self._grow(self.values, values)
            start, stop = len(self), len(self) + keys.shape[2]
            self._begin, self._end = 0, start
        self.keys[:, :, start:stop] = keys
        self.values[:, :, start:stop] = values

    def _grow(self, old: mx.array | None, new: mx.array) -> mx.array:
        B, n_kv_heads, S, head_dim = new.shape
        room = (S + self.step - 1) // self.step * self.step + self.step
        room = mx.zeros((B, n_kv_heads, room, head_dim), new.dtype)
        if old is None:
            return room
        return mx.concatenate([old[:, :, self._begin : self._end], room], axis=2)


class DrafterContext:
    """The context of all layers.

    Args:
        sizes (list): For each layer the rows it can see, or ``None`` for all.

    Attributes:
        offset (int): Absolute position after the last row, that is, of the next anchor.
    """

    def __init__(self, sizes: list[int | None]):
        self.layers = [LayerContext(size) for size in sizes]
        self.offset = 0
        self._masks: dict[tuple, mx.array | None] = {}

    def seek(self, position: int):
        """Go on at an absolute position; rows before a gap are out of order and are dropped."""
        if position != self.offset:
            self.layers = [LayerContext(layer.size) for layer in self.layers]
            self.offset = position

    def mask(self, index: int, block_size: int, window: int | None, causal: bool):
        """:func:`block_mask` for a layer; the same one as long as its context is as long."""
        key = len(self.layers[index]), block_size, window, causal
        if key not in self._masks:
            # Layers differ in window; lengths of earlier rounds do not come back.
            same = {k: mask for k, mask in self._masks.items() if k[0] == key[0]}
            self._masks = same | {key: block_mask(*key)}
        return self._masks[key]

    def trim_to(self, position: int):
        """Forget the rows from an absolute position on."""
        if position < self.offset:
            for layer in self.layers:
                layer.drop(self.offset - position)
            self.offset = position

    def append(self, rows: Sequence[tuple[mx.array, mx.array]], position: int):
        """Add each layer's keys and values of rows that begin at an absolute position."""
        self.seek(position)
        # Until all layers have them, the context is nowhere.
        self.offset = -1
        for layer, (keys, values) in zip(self.layers, rows, strict=True):
            layer.append(keys, values)
        self.offset = position + keys.shape[2]

    @property
    def state(self) -> list[mx.array]:
        layers = [layer for layer in self.layers if layer.keys is not None]
        return [array for layer in layers for array in (layer.keys, layer.values)]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.state)


def block_mask(num_context: int, block_size: int, window: int | None, causal: bool):
    """Which keys, context then block, each row of a block sees.

    A row at position t sees a context key at s if ``t - s < window``. It sees every row of its
    block, or with ``causal`` those up to itself.

    Returns:
        mx.array or None: Booleans [block_size, num_context + block_size]; ``None`` for all.
    """
    if not causal and (window is None or num_context + block_size <= window):
        return None
    rows = mx.arange(block_size)[:, None]
    keys = mx.arange(-num_context, block_size)[None]
    visible = mx.ones((block_size, num_context + block_size), dtype=mx.bool_)
    if window is not None:
        visible = (keys >= 0) | (rows - keys < window)
    return visible & (keys <= rows) if causal else visible
