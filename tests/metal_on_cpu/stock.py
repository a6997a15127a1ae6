"""Kernels of MLX itself on the bench, from the headers in its wheel."""

import re

import mlx.core as mx

from .bench import BenchKernel
from .compiler import KERNELS, mlx_include

# What the products are made of.
_PIECES = (
    "get_pack_factor", "get_bytes_per_pack", "load_vector", "qdot", "dequantize",
    "qmv_wide_impl", "qmv_fast_impl",
)  # fmt: skip
# The most rows of a tile, and the lanes of a simdgroup along K.
TILE_ROWS, _LANES = 5, 8
_PLACE = """threadgroup_position_in_grid, simdgroup_index_in_threadgroup,
    thread_index_in_simdgroup);"""
_QMV = f"qmv_fast_impl<T, GS, BITS>(w, scales, biases, x, y, K, N, {_PLACE}"
_QMV_WIDE = f"qmv_wide_impl<T, GS, BITS, ROWS, {_LANES}>(w, scales, biases, x, y, K, N, M, {_PLACE}"
_SDPA = """sdpa_vector<T, D>(q, k, v, out, gqa, n, head, seq, head, seq, scale,
    (const device bool*)q, (const device T*)q, gqa, gqa, gqa, (const device T*)q, gqa,
    threadgroup_position_in_grid, threadgroups_per_grid,
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
    rows, size = x.shape[0], matrix.weight.shape[0]
    tiles = -(-rows // TILE_ROWS)
    template = [("ROWS", -(-rows // tiles))]
    grid = (32 * tiles, 2 * -(-size // (2 * 32 // _LANES)), 1)
    return _product("qmv_wide", _QMV_WIDE, x, matrix, template, grid)


def qmv(x: mx.array, matrix) -> mx.array:
    """MLX's own product of one row with matrices whose sizes are multiples of 512 and of 8."""
    grid = (32 * x.shape[0], 2 * matrix.weight.shape[0] // 8, 1)
    return _product("qmv_fast", _QMV, x, matrix, [], grid)


def _product(name, source, x, matrix, template, grid) -> mx.array:
    text = published("quantized.h")
    header = "\n".join(function(text, name) for name in _PIECES)
    header = f"constant constexpr int SIMD_SIZE = 32;\n{header}"
    names = ["w", "scales", "biases", "x", "K", "N", "M"]
    weight, scales, biases, group_size, bits, _ = matrix
    size = weight.shape[0]
    return BenchKernel(name, names, ["y"], source, header)(
        inputs=[weight, scales, biases, x, x.shape[1], size, x.shape[0]],
        template=[("T", x.dtype), ("GS", group_size), ("BITS", bits), *template],
        grid=grid,
        threadgroup=(32, 2, 1),
        output_shapes=[(x.shape[0], size)],
        output_dtypes=[x.dtype],
    )[0]


def sdpa_vector(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
    """MLX's own attention of one row: q [1, Hq, 1, D]; k, v [1, H, N, D]."""
    names = ["q", "k", "v", "gqa", "n", "head", "seq", "scale"]
    kernel = BenchKernel("sdpa", names, ["out"], _SDPA, published("sdpa_vector.h"))
    heads, N, D = k.shape[1:]
    strides = [mx.array(n, mx.uint64) for n in (N * D, D)]
    return kernel(
        inputs=[q, k, v, q.shape[1] // heads, N, *strides, D**-0.5],
        template=[("T", q.dtype), ("D", D)],
        grid=(q.shape[1] * 1024, 1, 1),
        threadgroup=(1024, 1, 1),
        output_shapes=[q.shape],
        output_dtypes=[q.dtype],
    )[0]
