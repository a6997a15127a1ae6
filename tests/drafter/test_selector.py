"""The selector: which rows of its codebooks are read, in every form that they come in."""

import mlx.core as mx
import pytest
from support.selectors import check_padding_anchor, make_selector
from support.tiny import HIDDEN, VOCAB, make_model

from mlx_dflash2.kernels.path_walk import path_walk
from mlx_dflash2.targets import bind
from mlx_dflash2.train.codebooks import factor_codebooks


@pytest.mark.parametrize("bits", [None, 8])
def test_an_anchor_beyond_the_codebooks_reads_their_last_row(bits):
    """A target with padding ids may emit one; no drafter has a row for it."""
    check_padding_anchor(make_selector(bits))


@pytest.mark.parametrize("bits", [None, 8])
def test_all_pair_scores_lead_to_the_drafted_path(bits):
    """Scoring every pair and walking gives what drafting gives."""
    selector = make_selector(bits)
    anchor, hidden = mx.array([3, VOCAB + 1]), mx.random.normal((2, 7, HIDDEN))
    path = selector(anchor, hidden, mx.random.normal((2, 7, VOCAB)))
    scores = selector.pair_scores(anchor, hidden, path.candidates, path.unary)
    assert scores.shape == (2, 7, 8, 8)
    assert mx.array_equal(path_walk(scores, path.candidates).tokens, path.tokens).item()


def test_factored_codebooks_draft_as_their_tables():
    """In the middle of training, too, a selector drafts with what it has learned."""
    selector, target = make_selector(None), bind(make_model("qwen3"))
    factor_codebooks(selector, target.embed, True)
    arrays = mx.array([3, 9]), mx.random.normal((2, 7, HIDDEN)), mx.random.normal((2, 7, VOCAB))
    factored = selector(*arrays)
    for name in ("predecessor_codebook", "successor_codebook"):
        table = selector[name].table(VOCAB)
        plain = make_selector(None)[name]
        plain.weight = table
        selector[name] = plain
    tables = selector(*arrays)
    assert mx.array_equal(factored.tokens, tables.tokens).item()
    assert mx.allclose(factored.unary, tables.unary).item()
