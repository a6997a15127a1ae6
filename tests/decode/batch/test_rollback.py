"""Ragged rollback, key by key: what a row of the batch sees is what it kept, in its window."""

import random
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ConcatenateKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from support.tiny import HYBRID, VOCAB, make_drafter, make_model

from mlx_dflash2.decode.batch.caches import BatchCache, check_batchable
from mlx_dflash2.decode.batch.draft import StackedContext, extend_rows
from mlx_dflash2.decode.rollback import Transaction
from mlx_dflash2.targets import bind

WINDOW = 16
KINDS = {
    "whole": (lambda: KVCache(), None),
    "window": (lambda: RotatingKVCache(WINDOW), WINDOW),
    "list": (lambda: CacheList(KVCache(), RotatingKVCache(WINDOW)), None),
}


def numbered(starts, width):
    """Keys [B, 1, width, 1] that are their own positions, from 1."""
    rows = mx.array(starts)[:, None] + mx.arange(1, width + 1)
    return rows[:, None, :, None].astype(mx.float32)


def single(make, length, step=7):
    cache = make()
    for part in cache.caches if isinstance(cache, CacheList) else [cache]:
        for start in range(0, length, step):
            rows = numbered([start], min(step, length - start))
            part.update_and_fetch(rows, rows)
    return cache


def assert_sees(cache, lengths, width, window):
    """Append a pass and compare what each of its rows sees with the positions that it should."""
    assert cache.offset.tolist() == lengths
    mask = cache.make_mask(width, window_size=window)
    rows = numbered(lengths, width)
    keys, values = cache.update_and_fetch(rows, rows)
    assert mx.array_equal(keys, values).item()
    mask = mx.broadcast_to(mask, (len(lengths), 1, width, keys.shape[2]))
    for b, length in enumerate(lengths):
        for i in range(width):
            seen = np.array(keys[b, 0, :, 0])[np.array(mask[b, 0, i])]
            last = length + i + 1
            first = 1 if window is None else max(1, last - window + 1)
            assert sorted(seen.tolist()) == list(range(first, last + 1)), (b, i)


@pytest.mark.parametrize("name", KINDS)
def test_every_row_sees_what_it_kept(name):
    make, window = KINDS[name]
    for seed in range(4):
        draw = random.Random(seed)
        lengths = [draw.choice([1, 3, 15, 16, 17, 40]) for _ in range(3)]
        batch = BatchCache()
        batch.join([[single(make, length)] for length in lengths])
        for step in range(14):
            width = draw.choice([1, 2, 3, 5, 8])
            transaction = Transaction(batch.layers, width)
            parts = batch.layers[0].caches if name == "list" else batch.layers
            windows = (None, WINDOW) if name == "list" else (window,)
            for part, part_window in zip(parts, windows, strict=True):
                assert_sees(part, lengths, width, part_window)
            keeps = [draw.randint(1, width) for _ in lengths]
            transaction.commit(keeps, [None])
            lengths = [n + keep for n, keep in zip(lengths, keeps, strict=True)]
            if step == 5:
                batch.leave([0, 2])
                lengths = lengths[::2]
            if step == 8:
                batch.join([[single(make, 21)]])
                lengths.append(21)
        # Drafting has failed: single rows from here on.
        for _ in range(3):
            for part, part_window in zip(parts, windows, strict=True):
                assert_sees(part, lengths, 1, part_window)
            lengths = [n + 1 for n in lengths]


def test_shared_padding_is_dropped():
    batch, lengths = BatchCache(), [1, 1]
    batch.join([[single(KVCache, 1)], [single(KVCache, 1)]])
    for step in range(160):
        rows = numbered(lengths, 8)
        transaction = Transaction(batch.layers, 8)
        batch.layers[0].update_and_fetch(rows, rows)
        keeps = [8, 1] if step % 2 else [1, 8]
        transaction.commit(keeps, [None])
        lengths = [n + keep for n, keep in zip(lengths, keeps, strict=True)]
        batch.compact(lengths)
        cache = batch.layers[0]
        assert cache.size() < max(lengths) + cache.step
        assert cache.keys.shape[2] < max(lengths) + 2 * cache.step
    assert_sees(cache, lengths, 3, None)


def test_recurrent_states():
    """A row's state and window are those of its kept rows alone, bit for bit."""
    target = bind(make_model(HYBRID))
    tokens = mx.random.randint(0, VOCAB, (3, 5 + 6))
    singles = [make_prompt_cache(target.model) for _ in range(3)]
    for b, cache in enumerate(singles):
        target.forward(tokens[b : b + 1, : 3 + b], cache)
    batch = BatchCache()
    batch.join([list(cache) for cache in singles])
    inputs = mx.stack([tokens[b, 3 + b : 9 + b] for b in range(3)])
    transaction = Transaction(batch.layers, 6)
    out = target.forward(inputs, batch.layers, record=True)
    keeps = [6, 1, 3]
    transaction.commit(keeps, out.records)
    for b, (cache, keep) in enumerate(zip(singles, keeps, strict=True)):
        target.forward(inputs[b : b + 1, :keep], cache)
        for ours, theirs in zip(batch.extract(b), cache, strict=True):
            assert type(ours) is type(theirs)
            if isinstance(ours, ArraysCache):
                for x, y in zip(ours.state[0], theirs.state[0], strict=True):
                    assert mx.allclose(x, y, rtol=0, atol=1e-5).item()
            else:
                assert ours.offset == theirs.offset == 3 + b + keep


def test_a_recurrent_state_without_a_record():
    batch = BatchCache()
    cache = ArraysCache(1)
    cache[0] = mx.zeros((1, 2))
    batch.join([[cache]])
    with pytest.raises(RuntimeError, match="unrecorded"):
        Transaction(batch.layers, 2).commit([1], [None])


def test_a_class_that_cannot_be_batched_is_named():
    for caches in ([ConcatenateKVCache()], [CacheList(KVCache(), ConcatenateKVCache())]):
        with pytest.raises(ValueError, match="ConcatenateKVCache") as error:
            check_batchable([caches])
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("lengths", [(0, 5, 40), (3, 3), (15, 16, 17)])
@pytest.mark.parametrize("window", [None, 16])
def test_contexts_of_different_lengths(window, lengths):
    drafter = make_drafter(window)
    contexts, alone = [], []
    embeddings = mx.random.normal((len(lengths), 8, 64))
    taps = mx.random.normal((len(lengths), max(lengths), 2 * 64))
    for b, length in enumerate(lengths):
        contexts.append(drafter.make_context())
        if length:
            drafter.extend(contexts[-1], mx.zeros(length), taps[b : b + 1, :length], 0)
        alone.append(drafter(embeddings[b : b + 1], contexts[-1]))
    together = drafter(embeddings, StackedContext(contexts))
    assert mx.allclose(together, mx.concatenate(alone), rtol=0, atol=1e-4).item()
    target = SimpleNamespace(
        vocab_size=VOCAB,
        embed=lambda tokens: embeddings[: len(tokens)],
        head=lambda hidden: mx.repeat(hidden, VOCAB // 64, axis=-1),
    )
    keys = [mx.random.key(b) for b in range(len(lengths))]
    anchors = mx.arange(len(lengths), dtype=mx.uint32)
    found = drafter.propose_rows(target, anchors, StackedContext(contexts), 8, 0.7, keys)
    assert [x.tokens.size for x in found] == [7] * len(lengths)
    assert all(x.q.shape == (7, 8) and x.finite.item() for x in found)


@pytest.mark.parametrize("window", [None, 16])
def test_contexts_take_the_rows_that_were_kept(window):
    drafter, keeps, width = make_drafter(window), [[5, 1, 3], [2, 5, 5], [5, 5, 1]], 5
    together, alone = ([drafter.make_context() for _ in range(3)] for _ in range(2))
    positions = [0, 7, 40]
    for kept in keeps:
        tokens = mx.zeros((3, width), mx.uint32)
        taps = mx.random.normal((3, width, 2 * 64))
        extend_rows(drafter, together, tokens, taps, positions, kept)
        for b, keep in enumerate(kept):
            drafter.extend(alone[b], tokens[b, :keep], taps[b : b + 1, :keep], positions[b])
            positions[b] += keep
    for ours, theirs, position in zip(together, alone, positions, strict=True):
        assert ours.offset == theirs.offset == position
        for x, y in zip(ours.layers, theirs.layers, strict=True):
            for a, b in zip(x.keys_and_values(), y.keys_and_values(), strict=True):
                assert a.shape == b.shape and mx.allclose(a, b, rtol=0, atol=1e-5).item()
