"""What the bench finds while a kernel runs, each with a control that must stay silent."""

# ruff: noqa: E501, one case a line reads best

import mlx.core as mx
import numpy as np
import pytest

from . import BenchKernel, MetalError, Schedule
from .running import run_source

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
LANE = "uint lane = thread_index_in_simdgroup;"
POSITION = "uint i = thread_position_in_grid.x;"

TILE = f"threadgroup float tile[64]; {POSITION} tile[i] = inp[i]; {BARRIER} out[i] = tile[63 - i];"
LOOP = f"""threadgroup float x[32]; {LANE} float acc = 0.0f;
    for (uint i = 0; i < 4; ++i) {{
        if (simdgroup_index_in_threadgroup == 0) {{ x[lane] = float(i); }}
        {BARRIER}
        acc += x[31 - lane];
        {BARRIER} // end
    }}
    out[thread_position_in_grid.x] = acc;"""
LANES = f"""threadgroup float x[32]; {LANE} x[lane] = inp[lane];
    simdgroup_barrier(mem_flags::mem_threadgroup); out[lane] = x[lane ^ 1];"""


def found(source, **options):
    """The kinds of finding."""
    with pytest.raises(MetalError) as caught:
        run_source(source, **options)
    return caught.value.kinds


SCHEDULES = [
    Schedule("forward"),
    Schedule("reverse"),
    Schedule("random", seed=3),
    Schedule("random", seed=4, preempt=5, reduce_order=3),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s.order}-{s.preempt}")
def test_races_are_found_whatever_the_schedule(launch, schedule):
    launch.schedule = schedule
    for correct, n in ((TILE, 64), (LOOP, 64), (LANES, 32)):
        run_source(correct, n=n, group=n)
    assert run_source(LOOP).tolist() == [6.0] * 64
    assert found(TILE.replace(BARRIER, "")) >= {"race"}
    assert found(TILE.replace("mem_threadgroup)", "mem_device)")) >= {"race"}
    assert found(TILE.replace("threadgroup_barrier", "simdgroup_barrier")) >= {"race"}
    assert found(LOOP.replace(f"{BARRIER} // end", "")) == {"race"}
    assert found(LANES.replace("simdgroup_barrier(mem_flags::mem_threadgroup);", ""), n=32) >= {
        "race"
    }


def test_a_missing_barrier_shows_in_the_result_too(launch):
    launch.mode = "fast"
    expected = np.arange(63, -1, -1)
    for seed in range(1, 6):
        launch.schedule = Schedule(seed=seed)
        np.testing.assert_array_equal(np.array(run_source(TILE)), expected)
        assert not np.array_equal(np.array(run_source(TILE.replace(BARRIER, ""))), expected)


def test_two_threadgroups_meet_only_in_atomics(launch):
    adds = "out[0] += inp[thread_position_in_grid.x];"
    assert found(adds, group=32, size=1, init_value=0.0) == {"race"}
    atomic = (
        "atomic_fetch_add_explicit(&out[0], inp[thread_position_in_grid.x], memory_order_relaxed);"
    )
    total = run_source(atomic, group=32, size=1, init_value=0.0, atomic_outputs=True)
    assert total.item() == 63 * 32


MEMORY = {
    "half of the tile is staged": (TILE.replace("tile[i] = inp[i];", "if (i < 32) { tile[i] = inp[i]; }"), "uninitialised"),
    "output read before written": (f"{POSITION} out[i] += 1.0f;", "uninitialised"),
    "output partly unwritten": (f"{POSITION} if (i != 5) {{ out[i] = 1.0f; }}", "unwritten"),
    "input read past its end": (f"{POSITION} out[i] = inp[i + 1];", "out-of-bounds"),
    "input read before its start": (f"{POSITION} out[i] = inp[int(i) - 1];", "out-of-bounds"),
    "output written past its end": (f"{POSITION} out[i + 1] = 1.0f;", "out-of-bounds"),
    "threadgroup overrun by pointer": (TILE.replace("tile[63 - i]", "(tile + 1)[63 - i]"), "out-of-bounds"),
    "threadgroup overrun by index": (TILE.replace("tile[63 - i]", "tile[64 - i]"), "undefined"),
    "private overrun": (f"{POSITION} float a[4] = {{0.0f, 1.0f, 2.0f, 3.0f}}; out[i] = a[i / 8];", "undefined"),
    "write to an input": ("((device float*)inp)[0] = 1.0f; out[thread_position_in_grid.x] = 1.0f;", "read-only"),
    "shift past the width": (f"{POSITION} out[i] = float(1 << (int(i) + 1));", "undefined"),
    "division by zero": (f"{POSITION} out[i] = float(7 / int(inp[i]));", "undefined"),
    "float out of range of int": (f"{POSITION} out[i] = float(int(inp[i] * 1e10f));", "undefined"),
    "33 KB of threadgroup memory": (f"threadgroup float x[8448]; {POSITION} x[i] = inp[i]; out[i] = x[i];", "limit"),
}  # fmt: skip


@pytest.mark.parametrize("name", MEMORY)
def test_memory_errors(launch, name):
    source, kind = MEMORY[name]
    assert kind in found(source)


def test_misaligned_vector_access(launch):
    source = f"{POSITION} out[i] = dot(((const device float4*)inp)[i / 4], float4(1.0f));"
    run_source(source)
    launch.schedule = Schedule(skew=1)
    assert "misaligned" in found(source)


def test_guard_pages_without_instrumentation(launch):
    launch.mode = "fast"
    assert found(f"{POSITION} out[i] = inp[i + 1];") == {"out-of-bounds"}
    recursion = (
        "inline float f(float x, int n) { return n == 0 ? x : f(x, n - 1) * 1.5f + 1.0f; }\n"
    )
    assert found(f"{POSITION} out[i] = f(inp[0], 1000000);", header=recursion) == {"stack-overflow"}


def test_too_many_threads(launch):
    assert found(f"{POSITION} out[i] = inp[0];", n=2048, group=2048) == {"limit"}


DIVERGENT = {
    "simd_sum under a lane condition": f"{POSITION} float s = 0.0f; if (i % 32 < 20) {{ s = simd_sum(inp[i]); }} out[i] = s;",
    "uneven trip counts": f"{LANE} float t = 0.0f; for (uint r = lane; r < 40; r += 32) {{ t += simd_sum(inp[r]); }} out[thread_position_in_grid.x] = t;",
    "early return": f"{POSITION} if (i % 32 >= 20) {{ return; }} out[i] = simd_max(inp[i]);",
    "one helper from two branches": f"{POSITION} float y; if ((i & 31) < 16) {{ y = f(inp[i]); }} else {{ y = f(inp[i] * 2.0f); }} out[i] = y;",
    "different iterations": f"{LANE} float t = 0.0f; int n = int(inp[0]) + 2; for (int i = 0; i < n; ++i) {{ if ((lane < 16) == (i == 0)) {{ continue; }} t += simd_sum(1.0f); }} out[thread_position_in_grid.x] = t;",
    "barrier for one simdgroup": TILE.replace(BARRIER, f"if (i < 32) {{ {BARRIER} }}"),
}  # fmt: skip


@pytest.mark.parametrize("name", DIVERGENT)
def test_divergence(launch, name):
    assert "divergence" in found(
        DIVERGENT[name], header="inline float f(float x) { return simd_sum(x); }\n"
    )


def test_lanes_that_do_not_exist_or_do_not_agree(launch):
    shuffle = "out[thread_position_in_grid.x] = simd_shuffle_xor(inp[0], ushort(16));"
    assert found(shuffle, n=16, group=16) == {"inactive-lane"}
    broadcast = f"{POSITION} out[i] = simd_broadcast(inp[i], ushort(i & 1));"
    assert found(broadcast) == {"non-uniform"}


def test_every_attribute_on_a_grid_with_edge_groups(launch):
    source = """uint3 g = thread_position_in_grid; uint i = (g.z * 3 + g.y) * 70 + g.x;
        device int* o = out + i * 12;
        o[0] = threadgroup_position_in_grid.x; o[1] = threadgroup_position_in_grid.y;
        o[2] = thread_position_in_threadgroup.x; o[3] = thread_index_in_threadgroup;
        o[4] = threads_per_threadgroup.x; o[5] = threads_per_threadgroup.y;
        o[6] = simdgroup_index_in_threadgroup; o[7] = thread_index_in_simdgroup;
        o[8] = simdgroups_per_threadgroup; o[9] = dispatch_threads_per_threadgroup.x;
        o[10] = int(threads_per_grid.x * threads_per_grid.y * threads_per_grid.z) + int(inp[0]);
        o[11] = int(simd_sum(1u));"""
    kernel = BenchKernel("geometry", ["inp"], ["out"], source)
    out = kernel(
        inputs=[mx.zeros(9)],
        grid=(70, 3, 2),
        threadgroup=(64, 2, 1),
        output_shapes=[(2, 3, 70, 12)],
        output_dtypes=[mx.int32],
    )[0]
    out = np.array(out)
    for z, y, x in np.ndindex(2, 3, 70):
        gx, gy = x // 64, y // 2
        sx, sy = min(64, 70 - gx * 64), min(2, 3 - gy * 2)
        index, n = x % 64 + sx * (y % 2), sx * sy
        lanes = min(32, n - index // 32 * 32)
        expected = [gx, gy, x % 64, index, sx, sy, index // 32, index % 32, -(-n // 32), 64, 420]
        assert out[z, y, x].tolist() == [*expected, lanes]


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_narrow_floats_round_after_every_operation(launch, dtype):
    a, b, c = (mx.random.normal((4096,), key=mx.random.key(i)).astype(dtype) for i in range(3))
    source = f"{POSITION} out[i] = a[i] * b[i] + c[i];"
    out = BenchKernel("narrow", ["a", "b", "c"], ["out"], source)(
        inputs=[a, b, c],
        grid=(4096, 1, 1),
        threadgroup=(256, 1, 1),
        output_shapes=[(4096,)],
        output_dtypes=[dtype],
    )[0]
    assert mx.array_equal(out, a * b + c).item()


def test_strides_reach_a_kernel_that_asks_for_them(launch):
    source = """uint3 g = thread_position_in_grid;
        out[g.y * 6 + g.x] = x[g.y * x_strides[0] + g.x * x_strides[1]];"""
    kernel = BenchKernel("strided", ["x"], ["out"], source, ensure_row_contiguous=False)
    x = mx.arange(60).reshape(12, 5).astype(mx.float32)[::2, 1:4].T
    grid = (6, 3, 1)
    out = kernel(
        inputs=[x], grid=grid, threadgroup=grid, output_shapes=[(3, 6)], output_dtypes=[mx.float32]
    )[0]
    assert mx.array_equal(out, x).item()
