"""Selectors whose codebooks lack rows that a target has ids for."""

import mlx.core as mx

from mlx_dflash2.drafter.selector import CandidateSelector
from support.tiny import HIDDEN, VOCAB, make_drafter

PADDING = VOCAB + 58


def make_selector(bits: int | None) -> CandidateSelector:
    """A random selector, its codebooks plain tables or quantized."""
    mx.random.seed(4)
    selector = make_drafter(selector_rank=64).candidate_selector
    if bits is not None:
        for name in ("predecessor_codebook", "successor_codebook"):
            selector[name] = selector[name].to_quantized(group_size=64, bits=bits)
    return selector


def check_padding_anchor(selector: CandidateSelector) -> None:
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
