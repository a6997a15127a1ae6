"""Drafts from the true past of a text, at many places of it."""

import mlx.core as mx
import numpy as np
from support.tiny import DENSE, make_drafter, make_model

from mlx_dflash2.evaluation.teacher_forced import Replay, measure
from mlx_dflash2.targets import bind


def test_ids_that_cannot_be_drafted_are_never_likely():
    """A head that is cut off has no row of them."""
    drafter = make_drafter(selector_vocab_size=256)
    length = drafter.block_size - 1
    text = [*range(5, 20), *range(300, 300 + length), 7, 8]
    replay = Replay(bind(make_model(DENSE)), text, 4, drafter.target_layer_ids)
    forced = measure(drafter, replay, [14, 15])
    assert (forced.logprob[0] < -1000).all()
    np.testing.assert_array_equal(forced.logprob[1] < -1000, [True] * (length - 1) + [False])
    assert (forced.logprob <= 0).all() and not forced.best[0].any()
    assert mx.isfinite(mx.array(forced.logprob)).all()
