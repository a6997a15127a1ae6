"""The filters before a draw, by hand: which tokens they leave, and in which order they work."""

import mlx.core as mx
import pytest

from mlx_dflash2 import make_sampler

ROW = mx.log(mx.array([[0.4, 0.3, 0.2, 0.06, 0.04]]))


def left(**settings):
    """The tokens that a draw may give."""
    probs = make_sampler(1.0, **settings).probs(ROW, mx.random.key(0))
    return [token for token, p in enumerate(probs[0].tolist()) if p > 0]


def test_xtc_removes_all_above_its_threshold_but_the_least():
    assert left(xtc_probability=1.0, xtc_threshold=0.1) == [2, 3, 4]


@pytest.mark.parametrize("special, expected", [([0], [0, 2, 3, 4]), ([1], [1, 2, 3, 4])])
def test_xtc_leaves_its_special_tokens(special, expected):
    found = left(xtc_probability=1.0, xtc_threshold=0.1, xtc_special_tokens=special)
    assert found == expected


def test_top_k_counts_what_xtc_has_left():
    """mlx-lm applies XTC first: of what it leaves, top-k keeps the best."""
    assert left(xtc_probability=1.0, xtc_threshold=0.1, top_k=2) == [2, 3]
