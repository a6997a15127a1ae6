"""A context that goes back, and the masks that it keeps, by hand."""

import mlx.core as mx
import pytest

from mlx_dflash2.drafter.context import DrafterContext, block_mask


def rows(first, count):
    """Keys and values [1, 1, count, 1] that are their own positions."""
    x = mx.arange(first, first + count, dtype=mx.float32)[None, None, :, None]
    return [(x, x)]


@pytest.mark.parametrize("length", [0, 1, 5, 11, 12])
def test_rows_behind_the_place_gone_back_to_are_forgotten(length):
    context = DrafterContext([None])
    context.append(rows(0, 12), 0)
    context.trim_to(length)
    keys, values = context.layers[0].keys_and_values()
    assert context.offset == length
    assert keys.flatten().tolist() == values.flatten().tolist() == list(range(length))
    context.append(rows(length, 3), length)
    keys, _ = context.layers[0].keys_and_values()
    assert keys.flatten().tolist() == list(range(length + 3))


def test_masks_follow_the_length_of_the_context():
    context = DrafterContext([15])
    for end in range(1, 24):
        context.append(rows(end - 1, 1), end - 1)
        size = len(context.layers[0])
        for causal in (False, True):
            mask = context.mask(0, 4, 16, causal)
            expected = block_mask(size, 4, 16, causal)
            assert (mask is None) == (expected is None)
            assert mask is None or mx.array_equal(mask, expected).item()
