"""A few rows times a quantized matrix, whose weights are read and unpacked once for all of them."""

from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx

from ._common import LIBRARY, Op, Probe, pattern, placeholder

MIN_ROWS, MAX_ROWS = 2, 16
BITS, GROUP_SIZES = (4, 8), (32, 64, 128)
DTYPES = (mx.float32, mx.float16, mx.bfloat16)
# Weight rows that the lanes of a simdgroup hold along N, and lanes along K.
_ACROSS, _ALONG = 4, 8
# Up to so many weight rows the GPU is not full unless so many simdgroups share K.
_SHARES = ((1024, 8), (8192, 4))


class Packed(NamedTuple):
    """A matrix in MLX's affine layout.

    Attributes:
        weight (mx.array): [N, K * bits / 32] uint32.
        scales, biases (mx.array): [N, K / group_size].
        group_size, bits (int): How it is quantized.
        offset (mx.array, optional): Added to the product, [N].
    """

    weight: mx.array
    scales: mx.array
    biases: mx.array
    group_size: int
    bits: int
    offset: mx.array | None = None


def qmm_rows_ops(x: mx.array, matrix: Packed) -> mx.array:
    """Multiply rows with a quantized matrix: ``x @ dequantize(matrix).T + offset``.

    Args:
        x (mx.array): Rows [..., K], dtype of the scales.
        matrix (Packed): The matrix.

    Returns:
        mx.array: [..., N], dtype of ``x``.
    """
    weight, scales, biases, group_size, bits, offset = matrix
    y = mx.quantized_matmul(
        x, weight, scales=scales, biases=biases, group_size=group_size, bits=bits
    )
    return y if offset is None else y + offset


def qmm_rows_kernel(x: mx.array, matrix: Packed) -> mx.array:
    """Compute :func:`qmm_rows_ops` for 2 to 16 rows in one launch; sums are float32."""
    return launcher(matrix, x.size // x.shape[-1])(x)


def launcher(matrix: Packed, rows: int) -> Callable[[mx.array], mx.array]:
    """Make what multiplies ``rows`` rows with a matrix, so that a call does little in Python."""
    weight, scales, biases, group_size, bits, offset = matrix
    size, dtype = weight.shape[0], scales.dtype
    held, shares = _shape(rows, size, weight.shape[1] * 32 // bits, bits)
    names = ("x", "w", "scales", "biases", "offset")
    kernel = LIBRARY.kernel("qmm_rows", names, ("y",))
    arrays = weight, scales, biases, placeholder(dtype) if offset is None else offset
    fixed = {
        "template": [
            ("T", dtype),
            ("M", rows),
            ("BITS", bits),
            ("GS", group_size),
            ("ROWS", held),
            ("S", shares),
            ("BIASED", offset is not None),
        ],
        "grid": (32 * shares * -(-size // (_ACROSS * held)), 1, 1),
        "threadgroup": (32 * shares, 1, 1),
        "output_dtypes": [dtype],
    }

    def launch(x: mx.array) -> mx.array:
        return kernel(inputs=[x, *arrays], output_shapes=[(*x.shape[:-1], size)], **fixed)[0]

    return launch


def _shape(rows: int, size: int, width: int, bits: int) -> tuple[int, int]:
    """Return the weight rows that a lane holds, and the simdgroups that share K."""
    # Sums and weights of a lane have to fit into its registers.
    held = 4 if rows <= MAX_ROWS // 2 else 2
    steps = -(-width // (_ALONG * 128 // bits))
    shares = next((shares for most, shares in _SHARES if size <= most), 2)
    while shares > steps:
        shares //= 2
    return held, shares


def _probe(x: mx.array, matrix: Packed) -> Probe | None:
    weight, scales, biases, group_size, bits, offset = matrix
    width = x.shape[-1]
    rows = x.size // width
    known = bits in BITS and group_size in GROUP_SIZES and x.dtype in DTYPES
    if not known or not MIN_ROWS <= rows <= MAX_ROWS or weight.size == 0:
        return None
    if any(other.dtype != x.dtype for other in (scales, biases, offset) if other is not None):
        return None
    held, shares = _shape(rows, weight.shape[0], width, bits)

    def example() -> tuple:
        # All simdgroups have a part of K, no more of them, and the last threadgroup rows too many.
        size = _ACROSS * held + 1
        width = (shares - 1) * _ALONG * 128 // bits + group_size
        packed = mx.quantize(pattern((size, width)), group_size=group_size, bits=bits)
        levels = (part.astype(x.dtype) for part in packed[1:])
        extra = None if offset is None else pattern((size,), x.dtype, 2)
        values = (packed[0], *levels, group_size, bits, extra)
        return pattern((rows, width), x.dtype, 3), Packed._make(values)

    return Probe((x.dtype, rows, bits, group_size, held, shares, offset is not None), example)


qmm_rows = Op(qmm_rows_kernel, qmm_rows_ops, _probe)
