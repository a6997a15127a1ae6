"""The ops that the package calls take their kernels, and a drafter's selector runs on them."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from support.selectors import check_padding_anchor, make_selector

from mlx_dflash2 import kernels as ops
from mlx_dflash2.kernels.cases import all_cases, largest_error
from mlx_dflash2.kernels.pair_score import PairInputs

from . import MetalError
from .running import reload, run_op


@pytest.mark.parametrize(
    "name",
    sorted(set(ops.__all__) - {"PlainFormWarning", "active_kernels", "first_time", "switch_off"}),
)
def test_op_takes_its_kernel(kernels, name):
    case = next(c for c in all_cases() if c.kernel == name and not c.real and " 1x1" not in str(c))
    arguments = case.make(mx.bfloat16)
    for _ in range(2):
        assert largest_error(run_op(getattr(ops, name), arguments), case.expected(arguments)) <= 1
    assert ops.active_kernels() == {name: "metal"}
    assert kernels.launched == ["smallest", name, name, name]


def test_a_finding_is_not_taken_for_a_missing_metal(kernels):
    """A kernel that breaks a rule must fail the test, not fall back."""
    old, new = "winners[base + behind]", "winners[base + behind + 1]"
    kernels.edit = lambda text: replace(text, source=text.source.replace(old, new))
    with pytest.raises(MetalError):
        ops.top_k(mx.arange(9).astype(mx.float32)[None], 3)


def test_the_selector_by_hand(kernels):
    """Two positions, three candidates, rank two: neither Viterbi nor the best of each row."""
    A = mx.array([[1.0, 0], [0, 1], [1, 1], [2, 0], [0, -1], [1, -1]])
    B = mx.array([[0.0, 1], [1, 0], [1, 1], [-1, 2], [2, 0], [0, 0]])
    anchor, candidates = mx.array([2]), mx.array([[[1, 3, 4], [0, 2, 5]]], dtype=mx.uint32)
    unary, gate = mx.array([[[2.0, 1.5, 1.0], [0.5, 0.2, 1.0]]]), mx.array([[[1.0, 2], [-1, 3]]])
    inputs = PairInputs(anchor, candidates, unary, gate, A, B)
    scores = ops.pair_score(inputs)
    expected = [[[3, 4.5, 3]] * 3, [[3.5, 3.2, 1], [0.5, -1.8, 1], [-2.5, -2.8, 1]]]
    np.testing.assert_allclose(np.array(scores[0]), expected, atol=1e-6)
    for draw, path in (((), [3, 5]), ((1.0, (0.2, 0.5)), [3, 5]), ((1.0, (0.1, 0.5)), [1, 0])):
        drawing = (draw[0], mx.array([draw[1]])) if draw else ()
        assert ops.path_walk(scores, candidates, *drawing)[0].tolist() == [path]
        walked = ops.pair_walk(inputs, *drawing)
        assert walked[0].tolist() == [path]


@pytest.mark.parametrize("bits", [None, 8])
def test_an_anchor_beyond_the_codebooks_reads_their_last_row(kernels, bits):
    check_padding_anchor(make_selector(bits))
    assert "pair_walk" in kernels.launched


def test_kernels_agree_with_mlx_lm_bit_for_bit(kernels, monkeypatch):
    """Replayed and new rows give the bits of mlx-lm's own kernel, run a token at a time."""
    module = reload("mlx_lm.models.gated_delta", kernels, monkeypatch)
    (case,) = (
        c for c in all_cases() if str(c) == "gated_delta_verify[B1 T3 P3 Hk1 Hv2 Dk128 Dv16]"
    )
    q, rows, state, past, kept = case.make(mx.bfloat16)
    y, after = ops.gated_delta_verify(q, rows, state, past, kept)
    for t in range(kept.item()):
        row = [x[:, t : t + 1] for x in (past[0], *past)]
        _, state = module.gated_delta_kernel(*row, state)
    assert mx.array_equal(after, state).item()
    for t in range(q.shape[1]):
        out, state = module.gated_delta_kernel(*(x[:, t : t + 1] for x in (q, *rows)), state)
        assert mx.array_equal(y[:, t : t + 1], out).item()
