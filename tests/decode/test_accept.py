"""Acceptance on rows of log probabilities whose best tokens are known."""

import mlx.core as mx
import pytest

from mlx_dflash2.decode.accept import accept_greedy


def rows_for(best, vocab=12):
    return mx.stack([mx.where(mx.arange(vocab) == token, 0.0, -5.0) for token in best])


@pytest.mark.parametrize(
    "drafts, best, emitted",
    [
        ([5, 6, 7], [5, 6, 9, 4], [5, 6, 9]),
        ([5, 6, 7], [5, 6, 7, 4], [5, 6, 7, 4]),
        ([5, 6, 7], [1, 6, 7, 4], [1]),
        ([5, 6, 7], [1, 2, 3, 4], [1]),
        ([], [3], [3]),
    ],
    ids=["some", "all", "first wrong", "none", "no drafts"],
)
def test_the_agreeing_prefix_and_the_bonus(drafts, best, emitted):
    num_accepted, tokens = accept_greedy(mx.array(drafts, dtype=mx.uint32), rows_for(best))
    count = num_accepted.item()
    assert count == len(emitted) - 1
    assert tokens.tolist()[: count + 1] == emitted


def test_ties_go_to_the_lowest_id_as_in_mlx_lm():
    logprobs = mx.zeros((2, 5))
    assert accept_greedy(mx.array([0], dtype=mx.uint32), logprobs)[0].item() == 1
    assert accept_greedy(mx.array([1], dtype=mx.uint32), logprobs)[0].item() == 0
