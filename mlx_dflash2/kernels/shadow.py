"""A copy of a model's tree of modules that shares its arrays and computes few rows faster.

The caller's model stays what it is, and no class is patched: the copies of some modules belong to
classes of this file, or to a subclass made for them.
"""

import copy
from collections.abc import Callable, Collection
from types import FunctionType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import scaled_dot_product_attention

from .qmm_rows import Packed, launcher

# Rows for which attention is split; a prompt's chunks have more.
MOST_ROWS = 16
# MLX's fused kernel for few rows: the most rows, and rows times query heads for one of keys.
FUSED_ROWS, FUSED_QUERIES = 8, 32
FUSED_SIZES = (64, 96, 128, 192, 256)
# Its kernel for many rows, which begins behind these, knows only smaller heads.
MANY_ROWS_SIZE = 128

_NAME = scaled_dot_product_attention.__name__

RowsOf = Callable[[nn.Module], Collection[int]]


class RowsLinear(nn.QuantizedLinear):
    """A quantized linear layer that takes this package's kernel for some numbers of rows."""

    kernel_rows: Collection[int]
    launches: dict[int, Callable[[mx.array], mx.array]]

    def __call__(self, x: mx.array) -> mx.array:
        launch = _launch(self, x)
        return super().__call__(x) if launch is None else launch(x)


class RowsEmbedding(nn.QuantizedEmbedding):
    """A quantized embedding that does so where it is used as the head."""

    kernel_rows: Collection[int]
    launches: dict[int, Callable[[mx.array], mx.array]]

    def as_linear(self, x: mx.array) -> mx.array:
        launch = _launch(self, x)
        return super().as_linear(x) if launch is None else launch(x)


# Subclasses, such as those that are sharded, have a forward of their own and keep it.
_ROWS_CLASSES: dict[type, type[Any]] = {
    nn.QuantizedLinear: RowsLinear,
    nn.QuantizedEmbedding: RowsEmbedding,
}


def packed(module: nn.Module) -> Packed | None:
    """Return the matrix of a quantized module; ``None`` for other modules and layouts."""
    if type(module) not in (*_ROWS_CLASSES, *_ROWS_CLASSES.values()) or module.mode != "affine":
        return None
    offset = module.get("bias")
    values = (module["weight"], module["scales"], module["biases"])
    return Packed(*values, module.group_size, module.bits, offset)


def shadow(model: nn.Module, rows_of: RowsOf, split_attention: bool = True) -> nn.Module:
    """Copy the modules of a model, arrays shared.

    Args:
        model (nn.Module): A target or a drafter.
        rows_of (callable): Names for a quantized module the numbers of rows that take
            the kernel of :mod:`.qmm_rows`.
        split_attention (bool): Also split attention of a few rows as :func:`attend` does.
    """
    return _Shadow(rows_of, split_attention).of(model)


class _Shadow:
    """One copying; what occurs twice in the model is copied once."""

    def __init__(self, rows_of: RowsOf, split_attention: bool) -> None:
        self.rows_of, self.split_attention = rows_of, split_attention
        self.copies: dict[int, Any] = {}
        self.classes: dict[type, type] = {}

    def of(self, value: Any) -> Any:
        if not isinstance(value, nn.Module | list | tuple | dict):
            return value
        if id(value) not in self.copies:
            self.copies[id(value)] = self._copy(value)
        return self.copies[id(value)]

    def _copy(self, value: Any) -> Any:
        if isinstance(value, nn.Module):
            return self._module(value)
        if isinstance(value, dict):
            return {name: self.of(item) for name, item in value.items()}
        items = [self.of(item) for item in value]
        if isinstance(value, list):
            return items
        return value._make(items) if hasattr(value, "_make") else tuple(items)

    def _module(self, module: nn.Module) -> nn.Module:
        new = copy.copy(module)
        for name, item in module.items():
            # As an attribute, a module that is set would be taken out of the dictionary.
            dict.__setitem__(new, name, self.of(item))
        rows = self.rows_of(module) if packed(module) is not None else ()
        if rows:
            new.__class__ = _ROWS_CLASSES[type(module)]
            # A dictionary that is set in the ordinary way would count as parameters.
            object.__setattr__(new, "launches", {})
            new.kernel_rows = frozenset(rows)
        elif self.split_attention:
            new.__class__ = self._attention_class(type(module))
        return new

    def _attention_class(self, kind: type) -> type:
        if kind not in self.classes:
            self.classes[kind] = _split_class(kind)
        return self.classes[kind]


def _launch(module: Any, x: mx.array) -> Callable[[mx.array], mx.array] | None:
    """Return what multiplies so many rows, made at the first call; ``None`` for MLX's own."""
    rows = x.size // x.shape[-1]
    if rows not in module.kernel_rows or x.dtype != module["scales"].dtype:
        return None
    if rows not in module.launches and (matrix := packed(module)) is not None:
        module.launches[rows] = launcher(matrix, rows)
    return module.launches[rows]


def _split_class(kind: type) -> type:
    """Return a class whose forward is that of ``kind`` with another attention function."""
    call = kind.__call__
    if not isinstance(call, FunctionType) or _NAME not in call.__code__.co_names:
        return kind
    if call.__globals__.get(_NAME) is not scaled_dot_product_attention:
        return kind
    names = call.__globals__ | {_NAME: attend}
    own = FunctionType(call.__code__, names, call.__name__, call.__defaults__, call.__closure__)
    own.__kwdefaults__ = call.__kwdefaults__
    return type(kind.__name__, (kind,), {"__call__": own, "__module__": kind.__module__})


def attend(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attend as mlx-lm does, a few rows at a time where MLX's fused kernel takes no more.

    Without it scores are written to memory and keys and values read once for each query head.

    Args:
        queries, keys, values, cache, scale, mask, sinks: As for mlx-lm's
            ``scaled_dot_product_attention``.
    """
    at_once = None if hasattr(cache, "bits") else rows_at_once(queries, keys, values)
    if at_once is None:
        return scaled_dot_product_attention(queries, keys, values, cache, scale, mask, sinks)
    rows, parts = queries.shape[2], []
    size = -(-rows // -(-rows // at_once))
    for start in range(0, rows, size):
        end = min(start + size, rows)
        part_mask, seen = mask, keys.shape[2]
        if isinstance(mask, mx.array):
            part_mask = mask if mask.shape[-2] == 1 else mask[..., start:end, :]
        elif mask == "causal":
            # Of the newest keys these rows see all but those of later rows.
            seen -= rows - end
        parts.append(
            scaled_dot_product_attention(
                queries[:, :, start:end],
                keys[:, :, :seen],
                values[:, :, :seen],
                cache,
                scale,
                part_mask,
                sinks,
            )
        )
    return mx.concatenate(parts, axis=2)


def rows_at_once(queries: mx.array, keys: mx.array, values: mx.array) -> int | None:
    """Return the rows that MLX's fused attention takes; ``None`` to leave them together."""
    rows, size = queries.shape[2:]
    share = queries.shape[1] // keys.shape[1]
    if size not in FUSED_SIZES or values.shape[-1] != size or not 1 < rows <= MOST_ROWS:
        return None
    if share > FUSED_QUERIES or (rows > FUSED_ROWS and size <= MANY_ROWS_SIZE):
        return None
    most = min(FUSED_ROWS, FUSED_QUERIES // share)
    return None if rows <= most else most
