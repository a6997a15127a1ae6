"""Drafters against what the published reference computes, round by round."""

import mlx.core as mx
import numpy as np
import pytest
from golden import CASES, GOLDEN, HeadTarget, rounds

from mlx_dflash2.load import load_drafter


def drafted(drafter, target, golden):
    anchor, block = int(golden["anchor"]), int(golden["block"])
    ids = mx.array([[anchor] + [drafter.args.mask_token_id] * (block - 1)])
    return mx.array([anchor]), target.embed(ids), block


@pytest.mark.parametrize("case", CASES)
def test_rounds_match_the_reference(case):
    drafter, target = load_drafter(GOLDEN / case), HeadTarget(case)
    context, position = drafter.make_context(), 0
    for golden in rounds(case):
        taps = mx.array(golden["taps"])
        drafter.extend(context, mx.zeros(taps.shape[1]), taps, position)
        position += taps.shape[1]
        anchor, embedded, block = drafted(drafter, target, golden)
        hidden = drafter(embedded, context)
        np.testing.assert_allclose(np.array(hidden), golden["hidden"], atol=2e-4)
        if drafter.args.has_selector:
            path = drafter.candidate_selector(anchor, hidden, target.head(hidden))
            np.testing.assert_array_equal(np.array(path.candidates), golden["candidates"])
        proposal = drafter.propose(target, anchor, context, block)
        np.testing.assert_array_equal(np.array(proposal.tokens)[None], golden["path"])
        assert proposal.finite.item()


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
