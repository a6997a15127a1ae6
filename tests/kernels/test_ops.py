"""The plain MLX ops against NumPy references and hand-computed vectors."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_dflash2.kernels.grouped_conv import grouped_conv_ops
from mlx_dflash2.kernels.pair_score import PairInputs, pair_score_ops
from mlx_dflash2.kernels.path_walk import path_walk_ops
from mlx_dflash2.kernels.top_k import top_k_ops


def top_k_reference(x, k):
    """[rows, V] -> values, ids; NumPy's stable sort is the rule spelled out."""
    ids = np.argsort(-x, axis=-1, kind="stable")[..., :k]
    return np.take_along_axis(x, ids, -1), ids


def conv_reference(x, base, dynamic):
    """[L, H], [K, H], [L, K, G] in float64."""
    L, H = x.shape
    K, G = dynamic.shape[1:]
    out = np.zeros((L, H))
    for row in range(L):
        for tap in range(min(row, K - 1) + 1):
            kernel = base[tap] + np.repeat(dynamic[row, tap], H // G)
            out[row] += kernel * x[row - tap]
    return out


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize(
    "shape, k", [((1,), 1), ((7, 5), 5), ((3, 4, 100), 16), ((7, 4099), 16)], ids=str
)
def test_top_k_orders_by_value_then_id(shape, k, dtype):
    rng = np.random.default_rng(0)
    # Few distinct values: ties at the boundary and inside the set.
    x = mx.array(rng.integers(0, 40, shape).astype(np.float32) / 8).astype(dtype)
    values, ids = top_k_ops(x, k)
    expected_values, expected_ids = top_k_reference(np.array(x.astype(mx.float32)), k)
    np.testing.assert_array_equal(np.array(ids), expected_ids)
    np.testing.assert_array_equal(np.array(values), expected_values)


def test_top_k_transforms_only_the_chosen_values():
    """The soft cap sends many logits to one value; the order stays that of the raw logits."""
    x = mx.array([[1e4, 3e4, 2e4, 10.0, -50.0]])
    values, ids = top_k_ops(x, 3, multiplier=0.196116, softcap=20.0)
    assert ids.tolist() == [[1, 2, 0]]
    np.testing.assert_allclose(np.array(values), 20.0, rtol=1e-6)
    values, _ = top_k_ops(mx.array([[10.0, 100.0, -50.0]]), 3, multiplier=0.196116, softcap=20.0)
    np.testing.assert_allclose(np.array(values), [[15.066343, 1.954900, -9.088937]], rtol=1e-5)


def test_top_k_keeps_ids_in_range_on_nan():
    values, ids = top_k_ops(mx.full((2, 50), float("nan")), 4)
    assert mx.all(ids < 50).item()
    assert not mx.all(mx.isfinite(values)).item()


@pytest.mark.parametrize("k", [0, 6])
def test_top_k_refuses_k(k):
    with pytest.raises(ValueError, match=rf"\[1, 5\] but is {k}"):
        top_k_ops(mx.zeros((1, 5)), k)


def test_grouped_conv_by_hand():
    base = mx.array([[1.0, 1, 1, 1], [0.5, 0, -1, 2]])
    x = mx.array([[1.0, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]])
    dynamic = mx.array([[[0.0, 0], [9, 9]], [[1, 0], [0, 1]], [[0, -1], [0.5, 0]]])
    expected = [[1, 2, 3, 4], [10.5, 12, 7, 20], [14, 13, -7, 16]]
    one = grouped_conv_ops(x[None], base, dynamic[None])
    assert one.tolist() == [expected]
    two = grouped_conv_ops(mx.stack([x, x]), base, mx.stack([dynamic, dynamic]))
    assert two.tolist() == [expected, expected]


@pytest.mark.parametrize(
    "L, H, G, K", [(1, 4, 2, 2), (8, 48, 3, 2), (3, 32, 32, 5), (16, 64, 1, 3)]
)
def test_grouped_conv_matches_numpy(L, H, G, K):
    rng = np.random.default_rng(1)
    x, base, dynamic = (rng.standard_normal(s) for s in ((L, H), (K, H), (L, K, G)))
    out = grouped_conv_ops(
        *(mx.array(a.astype(np.float32)) for a in (x[None], base, dynamic[None]))
    )
    np.testing.assert_allclose(np.array(out[0]), conv_reference(x, base, dynamic), atol=1e-5)


def test_grouped_conv_identity_is_exact():
    x = mx.random.normal((2, 5, 8)).astype(mx.bfloat16)
    base = mx.concatenate([mx.ones((1, 8)), mx.zeros((1, 8))])
    assert mx.array_equal(grouped_conv_ops(x, base, mx.zeros((2, 5, 2, 2))), x).item()


@pytest.fixture
def chain():
    """Two positions, three candidates, rank two; all numbers small enough to check by hand."""
    A = mx.array([[1.0, 0], [0, 1], [1, 1], [2, 0], [0, -1], [1, -1]])
    B = mx.array([[0.0, 1], [1, 0], [1, 1], [-1, 2], [2, 0], [0, 0]])
    candidates = mx.array([[[1, 3, 4], [0, 2, 5]]], dtype=mx.uint32)
    unary = mx.array([[[2.0, 1.5, 1.0], [0.5, 0.2, 1.0]]])
    gate = mx.array([[[1.0, 2], [-1, 3]]])
    return pair_score_ops(PairInputs(mx.array([2]), candidates, unary, gate, A, B)), candidates


def test_pair_score_by_hand(chain):
    scores, _ = chain
    np.testing.assert_allclose(np.array(scores[0, 0]), [[3, 4.5, 3]] * 3, atol=1e-6)
    expected = [[3.5, 3.2, 1], [0.5, -1.8, 1], [-2.5, -2.8, 1]]
    np.testing.assert_allclose(np.array(scores[0, 1]), expected, atol=1e-6)


def test_greedy_walk_is_neither_viterbi_nor_independent(chain):
    tokens, choices, q = path_walk_ops(*chain)
    assert tokens.tolist() == [[3, 5]]
    assert choices.tolist() == [[1, 2]]
    assert q.tolist() == [[[0, 1, 0], [0, 0, 1]]]


@pytest.mark.parametrize("uniforms, path", [((0.2, 0.5), [3, 5]), ((0.1, 0.5), [1, 0])])
def test_sampled_walk_by_hand(chain, uniforms, path):
    tokens, _, q = path_walk_ops(*chain, temperature=1.0, uniforms=mx.array([uniforms]))
    assert tokens.tolist() == [path]
    np.testing.assert_allclose(np.array(q[0, 0]), [0.154281, 0.691438, 0.154281], atol=1e-5)
    if path[0] == 3:
        np.testing.assert_allclose(np.array(q[0, 1]), [0.363771, 0.036471, 0.599757], atol=1e-5)


def test_sampled_walk_divides_by_temperature(chain):
    _, _, q = path_walk_ops(*chain, temperature=0.5, uniforms=mx.array([[0.5, 0.5]]))
    np.testing.assert_allclose(np.array(q[0, 0]), [0.045279, 0.909443, 0.045279], atol=1e-5)


def test_parallel_scores_equal_the_sequential_walk():
    rng = np.random.default_rng(2)
    V, R, K, L = 300, 64, 16, 7
    A, B, gate = (rng.standard_normal(s).astype(np.float32) for s in ((V, R), (V, R), (L, R)))
    candidates = np.stack([rng.permutation(V)[:K] for _ in range(L)]).astype(np.uint32)
    unary = rng.standard_normal((L, K)).astype(np.float32)
    arrays = [mx.array(x) for x in (candidates[None], unary[None], gate[None], A, B)]
    scores = pair_score_ops(PairInputs(mx.array([17]), *arrays))
    tokens, _, _ = path_walk_ops(scores, arrays[0])
    previous, path = 17, []
    for t in range(L):
        s = unary[t] + (A[previous].astype(np.float64) * gate[t]) @ B[candidates[t]].T
        previous = int(candidates[t][s.argmax()])
        path.append(previous)
    assert tokens.tolist() == [path]
