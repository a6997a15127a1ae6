"""What the bench counts of a launch, on kernels whose counts are known."""

import mlx.core as mx
import pytest

from .running import run_source


@pytest.fixture
def counted(metal_cpu):
    metal_cpu.mode = "count"

    def run(source, **options):
        run_source(source, **options)
        return metal_cpu.counts

    return run


def test_one_load_one_sum_one_store(counted):
    counts = counted(
        "uint i = thread_position_in_grid.x; out[i] = inp[i] * 3.0f + 1.0f;", n=64, group=32
    )
    assert (counts.load, counts.store, counts.alu, counts.threadgroups) == (64, 64, 64, 2)
    assert counts.bytes_read == counts.bytes_written == counts.distinct_bytes == 256
    assert counts.shuffle == counts.barrier == counts.threadgroup == counts.branch == 0


def test_constant_loops_are_unrolled_and_reads_of_the_same_counted(counted):
    counts = counted(
        """float sum = 0.0f;
        for (uint i = 0; i < 16; ++i) {
            sum += inp[i];
        }
        out[thread_position_in_grid.x] = sum;""",
        n=64,
    )
    assert counts.load == 64 * 16 and counts.distinct_bytes == 16 * 4
    assert 15 * 64 <= counts.alu <= 16 * 64 and counts.branch == 0


def test_loops_of_unknown_length_count_their_jumps(counted):
    counts = counted(
        """float sum = 0.0f;
        for (uint i = 0; i < uint(inp[3]); ++i) {
            sum += inp[i] * inp[i];
        }
        out[thread_position_in_grid.x] = sum;""",
        n=64,
    )
    # Each of 3 rounds squares and adds, counts and compares.
    assert counts.branch >= 3 * 64 and counts.alu >= 3 * 3 * 64


def test_what_crosses_lanes_and_threadgroup_memory(counted):
    counts = counted(
        """threadgroup float tile[64];
        const uint i = thread_index_in_threadgroup;
        tile[i] = inp[i];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[i] = simd_shuffle_xor(tile[63 - i], 1) + simd_sum(inp[i]);""",
        n=64,
    )
    assert (counts.barrier, counts.shuffle, counts.threadgroup) == (64, 128, 128)
    assert counts.load == 64 + (64 if counts.bytes_read == 512 else 0)
    # Not what the bench does to exchange values.
    assert counts.alu <= 4 * 64 and counts.store == 64


def test_vectors_are_loaded_at_once_and_computed_by_the_number(counted):
    counts = counted(
        """const uint i = thread_position_in_grid.x;
        const float4 v = ((const device float4*)inp)[i] * 2.0f;
        out[i] = v.x + v.y + v.z + v.w;""",
        n=16,
        group=4,
        grid=(4, 1, 1),
        size=4,
    )
    assert (counts.load, counts.bytes_read) == (4, 64) and 5 * 4 <= counts.alu <= 8 * 4


def test_launches_add_up(counted):
    source = "out[thread_position_in_grid.x] = inp[0];"
    once = counted(source)
    assert counted(source).load == 2 * once.load


def test_the_result_is_the_same(metal_cpu):
    metal_cpu.mode = "count"
    out = run_source("uint i = thread_position_in_grid.x; out[i] = inp[i] * 3.0f + 1.0f;")
    assert mx.array_equal(out, mx.arange(64) * 3.0 + 1.0).item()
