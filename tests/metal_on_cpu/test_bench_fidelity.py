"""Kernels that MLX and mlx-lm ship, taken from the installed wheels: right results, no findings."""

from functools import partial

import mlx.core as mx
import numpy as np
import pytest

from mlx_dflash2.kernels import qmm_rows
from mlx_dflash2.kernels.cases import all_cases, quantized_matrix

from . import BenchKernel, Schedule
from .running import reload
from .stock import published, qmv, qmv_wide, sdpa_vector

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
TOLERANCE = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 2e-2}
SCHEDULES = [Schedule(seed=1), Schedule("reverse"), Schedule(seed=2, preempt=20, reduce_order=5)]


def assert_close(out, expected):
    """Equal to the dtype's tolerance, relative to the largest value."""
    scale = mx.abs(expected.astype(mx.float32)).max()
    error = mx.abs(out.astype(mx.float32) - expected.astype(mx.float32)).max() / scale
    assert error.item() < TOLERANCE[out.dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "variant, size, threads", [("single_row", 1000, 256), ("looped", 5000, 1024)]
)
def test_softmax(launch, variant, size, threads, dtype):
    launch.lint_header = False  # templates of kernels declare threadgroup variables
    header = f"#define SOFTMAX_N_READS 4\n{published('softmax.h')}"
    arguments = "threadgroup_position_in_grid.x, thread_position_in_threadgroup.x, "
    if variant == "looped":
        arguments += "threads_per_threadgroup.x, "
    source = f"""softmax_{variant}<T, float>(x, out, size, {arguments}
        thread_index_in_simdgroup, simdgroup_index_in_threadgroup);"""
    kernel = BenchKernel("softmax", ["x", "size"], ["out"], source, header)
    x = (mx.random.normal((3, size), key=mx.random.key(0)) * 4).astype(dtype)
    for schedule in SCHEDULES:
        launch.schedule = schedule
        out = kernel(
            inputs=[x, size],
            template=[("T", dtype)],
            grid=(3 * threads, 1, 1),
            threadgroup=(threads, 1, 1),
            output_shapes=[x.shape],
            output_dtypes=[dtype],
        )[0]
        assert_close(out, mx.softmax(x, axis=-1, precise=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sdpa_vector(launch, dtype):
    launch.lint_header = False
    H, N, D = 2, 37, 64
    shapes = [(1, 2 * H, 1, D), (1, H, N, D), (1, H, N, D)]
    q, k, v = (
        mx.random.normal(s, key=mx.random.key(i)).astype(dtype) for i, s in enumerate(shapes)
    )
    expected = mx.fast.scaled_dot_product_attention(q, k, v, scale=D**-0.5)
    for schedule in SCHEDULES[::2]:
        launch.schedule = schedule
        assert_close(sdpa_vector(q, k, v), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norms_of_mlx_lm(metal_cpu, monkeypatch, dtype):
    """An RMSNorm with a threadgroup reduction, and one on strided rows of one simdgroup."""
    wide = reload("mlx_lm.kernels.norm_add_norm", metal_cpu, monkeypatch)
    narrow = reload("mlx_lm.kernels.rms_norm_sigmoid_gate", metal_cpu, monkeypatch)
    normal = partial(mx.random.normal, key=mx.random.key(0))
    norm = mx.fast.rms_norm
    weight = normal((600,)).astype(dtype)
    stream = normal((5, 600))
    x, gate = normal((2, 7, 3, 40)).astype(dtype).transpose(0, 2, 1, 3), normal((2, 7, 120))
    for schedule in SCHEDULES:
        metal_cpu.schedule = schedule
        holder = type("Norm", (), {"weight": weight, "eps": 1e-5})
        assert_close(
            wide.pre_norm(stream, holder, dtype=dtype),
            norm(stream, weight.astype(mx.float32), 1e-5),
        )
        out = narrow.rms_norm_sigmoid_gate(x, gate.astype(dtype), eps=1e-5)
        plain = norm(x, None, 1e-5).transpose(0, 2, 1, 3).flatten(2)
        assert_close(out, plain * mx.sigmoid(gate.astype(dtype)))


def test_gated_delta_of_mlx_lm(metal_cpu, monkeypatch):
    """Two layouts that are equal bit for bit by design, and equal to the plain form."""
    module = reload("mlx_lm.models.gated_delta", metal_cpu, monkeypatch)
    normal = partial(mx.random.normal, key=mx.random.key(1))
    q, k = normal((1, 3, 1, 128)) * 0.1, normal((1, 3, 1, 128)) * 0.1
    v, g, beta = normal((1, 3, 2, 16)), mx.sigmoid(normal((1, 3, 2))), mx.sigmoid(normal((1, 3, 2)))
    state = normal((1, 2, 16, 128))
    packed = module.gated_delta_kernel(q, k, v, g, beta, state)
    tree = module.gated_delta_kernel_xtree(q, k, v, g, beta, state)
    plain = module.gated_delta_ops(q, k, v, g, beta, state)
    for a, b, c in zip(packed, tree, plain, strict=True):
        assert mx.array_equal(a, b).item()
        np.testing.assert_allclose(np.array(a), np.array(c), atol=1e-5)
    assert len(metal_cpu.launched) == 2


@pytest.mark.parametrize(
    "shape", ["M5 K1024 N16 g64 b4", "M8 K512 N40 g64 b4", "M6 K320 N19 g64 b8"]
)
def test_products_of_a_few_rows(launch, shape):
    launch.lint_header = False
    case = next(c for c in all_cases() if c.kernel == "qmm_rows" and c.shape.startswith(shape))
    x, matrix = case.make(mx.float32)
    (expected,) = case.expected((x, matrix._replace(offset=None)))
    assert_close(qmv_wide(x, matrix), mx.array(expected.astype(np.float32)))


@pytest.mark.parametrize("bits", [4, 8])
def test_a_product_of_one_row(launch, bits):
    launch.lint_header = False
    x, matrix = quantized_matrix(1, 1024, 24, 64, bits)(mx.float32)
    expected = qmm_rows.ops(x, matrix)
    assert_close(qmv(x, matrix), expected)
