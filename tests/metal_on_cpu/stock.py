"""Kernels of MLX itself on the bench, from the headers in its wheel."""

import re

import mlx.core as mx

from .bench import BenchKernel
from .compiler import KERNELS, mlx_include

# What the products of few rows are made of.
_PIECES = ("get_pack_factor", "get_bytes_per_pack", "dequantize", "qmv_wide_impl")
# The most rows of a tile, and the lanes of a simdgroup along K.
TILE_ROWS, _LANES = 5, 8
_SOURCE = f"""qmv_wide_impl<T, GS, BITS, ROWS, {_LANES}>(
    w, scales, biases, x, y, K, N, M, threadgroup_position_in_grid,
    simdgroup_index_in_threadgroup, thread_index_in_simdgroup);"""


def published(name: str) -> str:
    """A header of MLX's kernels, made callable: function constants are off, nothing is a kernel."""
    text = (mlx_include() / KERNELS / name).read_text()
    text = re.sub(
        r"constant (\w+) (\w+) \[\[function_constant\(\d+\)\]\];", r"constant \1 \2 = 0;", text
    )
    text = re.sub(r"\[\[[^\]]*\]\]", "", text)
    return text.replace("constant int& axis_size", "const constant int& axis_size")


def function(text: str, name: str) -> str:
    """A function template out of a header."""
    at = re.search(rf"\b{name}\(", text).start()
    start, index, depth = text.rindex("template <", 0, at), text.index("{", at), 0
    while True:
        depth += (text[index] == "{") - (text[index] == "}")
        index += 1
        if depth == 0:
            return text[start:index]


def qmv_wide(x: mx.array, matrix) -> mx.array:
    """MLX's own product of a few rows: tiles of at most five, each of which unpacks the weights."""
    text = published("quantized.h")
    header = "\n".join(function(text, name) for name in _PIECES)
    header = f"constant constexpr int SIMD_SIZE = 32;\n{header}"
    names = ["w", "scales", "biases", "x", "K", "N", "M"]
    (M, K), N = x.shape, matrix.weight.shape[0]
    tiles = -(-M // TILE_ROWS)
    weight, scales, biases, group_size, bits, _ = matrix
    return BenchKernel("qmv_wide", names, ["y"], _SOURCE, header)(
        inputs=[weight, scales, biases, x, K, N, M],
        template=[("T", x.dtype), ("GS", group_size), ("BITS", bits), ("ROWS", -(-M // tiles))],
        grid=(32 * tiles, 2 * -(-N // (2 * 32 // _LANES)), 1),
        threadgroup=(32, 2, 1),
        output_shapes=[(M, N)],
        output_dtypes=[x.dtype],
    )[0]
