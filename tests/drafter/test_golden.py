"""Drafters against what the published reference computes, round by round."""

import mlx.core as mx
import numpy as np
import pytest
from support.golden import CASES, GOLDEN, HeadTarget, check_rounds, rounds

from mlx_dflash2.checkpoint.load import load_drafter


@pytest.mark.parametrize("case", CASES)
def test_rounds_match_the_reference(case):
    check_rounds(case)


@pytest.mark.parametrize("case", CASES)
def test_context_does_not_depend_on_how_it_was_fed(case):
    """One injection, pieces of 1, and pieces of 3 with a far-back cold start give one block."""
    drafter, target = load_drafter(GOLDEN / case), HeadTarget(case)
    taps = mx.concatenate([mx.array(golden["taps"]) for golden in rounds(case)], axis=1)
    total, size = taps.shape[1], drafter.context_size
    embedded = target.embed(mx.array([[7] + [drafter.args.mask_token_id] * 3]))
    start = 0 if size is None else total - size
    results = []
    for first, step in ((0, total), (0, 1), (start, 3)):
        context = drafter.make_context()
        for position in range(first, total, step):
            rows = taps[:, position : min(position + step, total)]
            drafter.extend(context, mx.zeros(rows.shape[1]), rows, position)
        assert context.offset == total
        results.append(np.array(drafter(embedded, context)))
    np.testing.assert_allclose(results[1], results[0], atol=1e-5)
    np.testing.assert_allclose(results[2], results[0], atol=1e-5)
