"""The drafter's context: what it holds, what it sees, and what it costs."""

import mlx.core as mx
import numpy as np
import pytest
from support.tiny import DENSE, HYBRID, VOCAB, make_drafter, make_model

from mlx_dflash2.drafter.context import DrafterContext, LayerContext, block_mask
from mlx_dflash2.generate import dflash_generate_step
from mlx_dflash2.targets import bind
from mlx_dflash2.targets.base import Target

WINDOW = 16


def reference_mask(num_context, block, window, causal):
    """Position by position, as the definition says."""
    mask = np.zeros((block, num_context + block), dtype=bool)
    for row in range(block):
        for key in range(num_context + block):
            position = key - num_context
            inside = position >= 0
            mask[row, key] = inside or window is None or row - position < window
            if causal and inside:
                mask[row, key] &= position <= row
    return mask


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 4, 16])
@pytest.mark.parametrize("block", [1, 3, 8])
@pytest.mark.parametrize("num_context", [0, 1, 3, 8, 15])
def test_block_mask(num_context, block, window, causal):
    if window is not None:
        num_context = min(num_context, window - 1)
    mask = block_mask(num_context, block, window, causal)
    expected = reference_mask(num_context, block, window, causal)
    assert np.array_equal(expected if mask is None else np.array(mask), expected)
    assert mask is not None or expected.all()


def test_window_by_hand():
    """Window 4, anchor at position 6, block 3: rows see 3-5, 4-5 and 5 of the context."""
    mask = np.array(block_mask(3, 3, 4, causal=False))
    assert mask[:, :3].tolist() == [[1, 1, 1], [0, 1, 1], [0, 0, 1]]
    assert mask[:, 3:].all()


@pytest.mark.parametrize("size", [None, 1, 5, 300])
def test_layer_context_keeps_the_latest_rows_in_order(size):
    context, expected, position = LayerContext(size), [], 0
    for count in (1, 7, 1, 300, 2, 1, 1, 600, 3):
        rows = mx.arange(position, position + count, dtype=mx.float32).reshape(1, 1, count, 1)
        context.append(rows, -rows)
        position += count
        expected = list(range(position))[-size if size else 0 :]
        block = mx.full((1, 1, 4, 1), 9e6)
        keys, values = context.with_block(block, block)
        assert len(context) == len(expected)
        assert keys.flatten().tolist() == [*expected, *[9e6] * 4]
        assert (-values).flatten().tolist() == [*expected, *[-9e6] * 4]


def test_seek_over_a_gap_starts_cold():
    context = DrafterContext([4, None])
    rows = mx.zeros((1, 1, 3, 2))
    for layer in context.layers:
        layer.append(rows, rows)
    context.offset = 3
    context.seek(3)
    assert [len(layer) for layer in context.layers] == [3, 3]
    context.seek(10)
    assert [len(layer) for layer in context.layers] == [0, 0] and context.offset == 10


def filled(drafter, taps, position=0):
    context = drafter.make_context()
    drafter.extend(context, mx.zeros(taps.shape[1]), taps, position)
    return context


def test_what_is_outside_the_window_cannot_change_a_draft():
    drafter, target = make_drafter(WINDOW), bind(make_model(DENSE))
    taps = mx.random.normal((1, 60, 2 * 64))
    embedded = target.embed(mx.array([[5] + [VOCAB - 1] * 7]))
    reference = drafter(embedded, filled(drafter, taps))
    outside, inside = mx.array(taps), mx.array(taps)
    outside[:, : 60 - (WINDOW - 1)] = 1e3
    inside[:, 60 - (WINDOW - 1)] = 1e3
    assert mx.array_equal(drafter(embedded, filled(drafter, outside)), reference).item()
    assert not mx.allclose(drafter(embedded, filled(drafter, inside)), reference).item()


class Watch:
    """Counts what a drafter is given and what a target runs."""

    def __init__(self, monkeypatch, drafter):
        self.extended, self.widths, self.tapped, self.head_rows = [], [], [], 0
        extend, forward, unembed = type(drafter).extend, Target.forward, Target.unembed

        def watched_extend(drafter, context, tokens, taps, position):
            self.extended.append((position, taps.shape[1]))
            self.context = context
            return extend(drafter, context, tokens, taps, position)

        def watched_forward(target, tokens, cache, tap_layers=(), record=False):
            self.widths.append(tokens.shape[1])
            out = forward(target, tokens, cache, tap_layers, record)
            self.tapped.append(0 if out.taps is None else out.taps.shape[1])
            self.records = out.records
            return out

        def watched_unembed(target, hidden, head=None):
            self.head_rows += hidden.shape[1]
            return unembed(target, hidden, head)

        monkeypatch.setattr(type(drafter), "extend", watched_extend)
        monkeypatch.setattr(Target, "forward", watched_forward)
        monkeypatch.setattr(Target, "unembed", watched_unembed)


@pytest.mark.parametrize("step", [1, 7, 50, 512])
@pytest.mark.parametrize("length", [1, 5, 14, 15, 16, 17, 50])
def test_a_prompt_gives_the_window_whatever_the_chunks(length, step, monkeypatch):
    drafter, model = make_drafter(WINDOW), make_model(DENSE)
    watch = Watch(monkeypatch, drafter)
    prompt = mx.arange(length) + 3
    steps = dflash_generate_step(prompt, model, drafter, max_tokens=3, prefill_step_size=step)
    next(steps), next(steps)
    rows = [position + i for position, count in watch.extended for i in range(count)]
    assert rows == list(range(max(0, length - (WINDOW - 1)), length))
    # The whole prompt once, in chunks of at most a step, and its last token alone.
    prefill = watch.widths[:-1]
    assert sum(prefill) == length and max(prefill) <= step and prefill[-1] == 1
    # Taps are kept only where a row of the window is in the chunk; one row went through the head.
    assert sum(watch.tapped[:-1]) < WINDOW - 1 + step
    assert watch.head_rows == 1 + 7 + 2


@pytest.mark.parametrize("kind", [DENSE, HYBRID])
def test_prefill_keeps_no_rollback_data(kind, monkeypatch):
    drafter = make_drafter(WINDOW)
    watch = Watch(monkeypatch, drafter)
    steps = dflash_generate_step(mx.arange(40), make_model(kind), drafter, max_tokens=9)
    next(steps)
    assert watch.records == [None] * 4


def context_bytes(window, length, max_tokens):
    drafter, model = make_drafter(window), make_model(DENSE)
    contexts = []
    original = drafter.make_context
    drafter.make_context = lambda: contexts.append(original()) or contexts[-1]
    prompt = mx.random.randint(0, VOCAB, (length,))
    list(dflash_generate_step(prompt, model, drafter, max_tokens=max_tokens))
    return contexts[-1].nbytes


def test_memory_of_a_sliding_drafter_is_flat():
    assert context_bytes(WINDOW, 100, 10) == context_bytes(WINDOW, 800, 10)
    assert context_bytes(WINDOW, 10, 100) < 1.05 * context_bytes(WINDOW, 10, 20)
    assert context_bytes(None, 100, 10) < context_bytes(None, 800, 10)
