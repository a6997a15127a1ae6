"""Arrays on the host side of a launch: NumPy storage with an MLX dtype."""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

# MLX dtype name -> NumPy storage; bfloat16 is kept as its bits.
STORAGE = {
    "bool": np.bool_,
    "int8": np.int8,
    "int16": np.int16,
    "int32": np.int32,
    "int64": np.int64,
    "uint8": np.uint8,
    "uint16": np.uint16,
    "uint32": np.uint32,
    "uint64": np.uint64,
    "float16": np.float16,
    "bfloat16": np.uint16,
    "float32": np.float32,
}


def dtype_name(dtype: mx.Dtype) -> str:
    """``mx.float32`` -> ``"float32"``."""
    return str(dtype).removeprefix("mlx.core.").rstrip("_")


def mx_dtype(name: str) -> mx.Dtype:
    """``"float32"`` -> ``mx.float32``."""
    return mx.bool_ if name == "bool" else getattr(mx, name)


@dataclass
class HostArray:
    """A NumPy array, possibly strided, and the name of the MLX dtype it stores."""

    data: np.ndarray
    dtype: str

    @classmethod
    def of(cls, x: mx.array | bool | int | float) -> "HostArray":
        """View an MLX array, strides included, or convert a scalar as MLX does for a kernel."""
        x = x if isinstance(x, mx.array) else mx.array(x)
        name = dtype_name(x.dtype)
        return cls(np.asarray(x.view(mx.uint16) if name == "bfloat16" else x), name)

    @classmethod
    def filled(cls, shape: tuple[int, ...], dtype: str, value: float | None) -> "HostArray":
        """An output buffer; without a value it holds all ones, since MLX does not clear outputs."""
        if value is None:
            data = np.zeros(shape, STORAGE[dtype])
            data.reshape(-1).view(np.uint8)[...] = 0xFF
            return cls(data, dtype)
        return cls.of(mx.full(shape, value, dtype=mx_dtype(dtype)))

    def to_mlx(self) -> mx.array:
        """The MLX array with the same bits."""
        x = mx.array(self.data)
        return x.view(mx.bfloat16) if self.dtype == "bfloat16" else x
