"""The selector's codebooks: which rows are read, in every form that they come in."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from support.tiny import HIDDEN, VOCAB, make_drafter

PADDING = VOCAB + 58


@pytest.fixture(params=["plain", "quantized"])
def selector(request):
    mx.random.seed(4)
    selector = make_drafter(selector_rank=64).candidate_selector
    if request.param == "quantized":
        for name in ("predecessor_codebook", "successor_codebook"):
            selector[name] = selector[name].to_quantized(group_size=64, bits=8)
    return selector


def check_padding_anchor(selector):
    """A padding anchor gives what the last row gives, to the last bit of the distributions."""
    hidden, logits = 4 * mx.random.normal((2, 7, HIDDEN)), mx.random.normal((2, 7, VOCAB))
    uniforms = mx.random.uniform(shape=(2, 7))
    padding, last, other = (
        selector(mx.array([anchor, 3], mx.uint32), hidden, logits, 1.0, uniforms)
        for anchor in (PADDING, VOCAB - 1, 0)
    )
    assert mx.array_equal(padding.tokens, last.tokens).item()
    assert mx.array_equal(padding.q, last.q).item()
    assert not mx.allclose(other.q[0, 0], last.q[0, 0], atol=1e-3).item()


def test_an_anchor_beyond_the_codebooks_reads_their_last_row(selector):
    """A target with padding ids may emit one; no drafter has a row for it."""
    check_padding_anchor(selector)
