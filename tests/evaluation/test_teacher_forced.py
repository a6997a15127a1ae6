"""Drafts from the true past of a text, at many places of it."""

import mlx.core as mx
import numpy as np
from support.tiny import DENSE, VOCAB, make_drafter, make_model

from mlx_dflash2.evaluation.teacher_forced import TextPass, measure_drafts
from mlx_dflash2.targets import bind


def test_ids_that_cannot_be_drafted_are_never_likely():
    """A head that is cut off has no row of them."""
    drafter = make_drafter(selector_vocab_size=256)
    length = drafter.block_size - 1
    text = [*range(5, 20), *range(300, 300 + length), 7, 8]
    text = TextPass(bind(make_model(DENSE)), text, 4, drafter.target_layer_ids)
    forced = measure_drafts(drafter, text, [14, 15])
    assert (forced.logprob[0] < -1000).all()
    np.testing.assert_array_equal(forced.logprob[1] < -1000, [True] * (length - 1) + [False])
    assert (forced.logprob <= 0).all() and not forced.best[0].any()
    assert mx.isfinite(mx.array(forced.logprob)).all()


def test_the_selector_is_told_the_true_token_before():
    """Also where that has no row in the codebooks: it reads their last row."""
    known, padding, length = VOCAB - 12, VOCAB - 1, 7
    drafter = make_drafter(vocab_size=known, mask_token_id=known - 1, selector_top_k=known)
    tokens = [*range(5, 20), padding, 30, padding, *range(40, 40 + length)]
    text = TextPass(bind(make_model(DENSE)), tokens, 4, drafter.target_layer_ids)
    anchor = 15
    quality = measure_drafts(drafter, text, [anchor])

    context, selector = drafter.make_context(), drafter.candidate_selector
    taps = text.taps(drafter.target_layer_ids)[:, :anchor]
    drafter.extend(context, text.tokens[:anchor], taps, 0)
    hidden, logits = drafter.run_block(text.target, mx.array([padding]), context, length + 1)
    gate = np.array(selector.hidden_projection(hidden[0]))
    A, B = (np.array(selector[f"{n}_codebook"].weight) for n in ("predecessor", "successor"))
    for t in range(length):
        before, truth = (tokens[anchor + t + step] for step in (0, 1))
        scores = np.array(logits[0, t]) + B @ (A[min(before, known - 1)] * gate[t])
        if truth < known:
            expected = scores[truth] - np.log(np.exp(scores).sum())
            np.testing.assert_allclose(quality.selector_logprob[0, t], expected, atol=1e-4)
            assert quality.chosen[0, t] == (scores.argmax() == truth)
        else:
            assert np.isnan(quality.selector_logprob[0, t])
