"""After a rollback a cache is what it would be had only the kept rows been run."""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)
from support.tiny import VOCAB, make_model

from mlx_dflash2.decode.rollback import Transaction, check_caches, num_cached, rows_at_once
from mlx_dflash2.targets import bind

KINDS = ["qwen3", "qwen3_5", "qwen3_5-conv2", "qwen3_next", "muse_glimmer", "gemma4_text-shared"]
ROWS = 5


def run(target, cache, tokens, record=False):
    return target.forward(mx.array([tokens]), cache, record=record)


def follow(target, cache, steps=(1, 3, 1)):
    """Logits of a few more tokens, in passes of several widths."""
    tokens = [(7 * i) % VOCAB for i in range(1, sum(steps) + 1)]
    logits = []
    for step in steps:
        logits.append(target.logits(run(target, cache, tokens[:step]).hidden))
        tokens = tokens[step:]
    return mx.concatenate(logits, axis=1)


@pytest.mark.parametrize("keep", range(ROWS + 1))
@pytest.mark.parametrize("length", [1, 2, 11, 15, 16, 17, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_kept_rows_are_all_that_is_left(kind, length, keep):
    target = bind(make_model(kind))
    prompt = mx.random.randint(0, VOCAB, (length,)).tolist()
    rows = mx.random.randint(0, VOCAB, (ROWS,)).tolist()
    cache, fresh = target.make_cache(), target.make_cache()
    run(target, cache, prompt)
    transaction = Transaction(cache, ROWS)
    out = run(target, cache, rows, record=True)
    transaction.commit([keep], out.records)
    run(target, fresh, prompt)
    for token in rows[:keep]:
        run(target, fresh, [token])
    assert num_cached(cache) == num_cached(fresh) == length + keep
    for ours, theirs in zip(cache, fresh, strict=True):
        if isinstance(ours, ArraysCache) and keep:
            assert all(
                mx.array_equal(a, b).item() for a, b in zip(ours.cache, theirs.cache, strict=True)
            )
    # A ring in another order sums the same terms in another order.
    expected = follow(target, fresh)
    assert mx.allclose(follow(target, cache), expected, rtol=0, atol=2e-5).item()


@pytest.mark.parametrize("keep", range(1, ROWS))
def test_a_wrapped_ring_appends_nothing_again(keep, monkeypatch):
    target = bind(make_model("muse_glimmer"))
    cache = target.make_cache()
    run(target, cache, list(range(40)))
    transaction = Transaction(cache, ROWS)
    out = run(target, cache, [1] * ROWS)
    monkeypatch.setattr(RotatingKVCache, "update_and_fetch", None)
    transaction.commit([keep], out.records)
    assert num_cached(cache) == 40 + keep


@pytest.mark.parametrize("after", [0, 1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_abort_from_the_middle_of_a_pass(kind, after):
    """A pass that dies between two layers leaves no trace."""
    target = bind(make_model(kind))
    cache, prompt = target.make_cache(), list(range(1, 20))
    run(target, cache, prompt)
    transaction = Transaction(cache, ROWS)
    original, count = target.run_layer, iter(range(100))

    def dies(*args):
        if next(count) == after:
            raise KeyboardInterrupt
        return original(*args)

    target.run_layer = dies
    with pytest.raises(KeyboardInterrupt):
        run(target, cache, [1] * ROWS)
    target.run_layer = original
    transaction.abort()
    fresh = target.make_cache()
    run(target, fresh, prompt)
    assert mx.array_equal(follow(target, cache), follow(target, fresh)).item()


@pytest.mark.parametrize("offset, rows", [(0, 16), (3, 13), (11, 5), (15, 1), (16, 1), (90, 1)])
def test_a_ring_with_a_kept_head_takes_only_rows_that_fit(offset, rows):
    """Where more rows would wrap it, mlx-lm's mask of several rows hides the kept head."""
    target = bind(make_model("qwen3"))
    cache, fresh = target.make_cache(max_kv_size=16), target.make_cache(max_kv_size=16)
    for token in range(offset):
        run(target, cache, [token])
        run(target, fresh, [token])
    assert rows_at_once(cache) == rows
    tokens = list(range(100, 100 + rows))
    transaction = Transaction(cache, rows)
    keep = (rows + 1) // 2
    transaction.commit([keep], run(target, cache, tokens).records)
    for token in tokens[:keep]:
        run(target, fresh, [token])
    expected = follow(target, fresh, steps=(1, 1))
    assert mx.allclose(follow(target, cache, steps=(1, 1)), expected, atol=2e-5).item()


def test_lists_of_caches_are_rolled_back_one_by_one():
    cache = CacheList(KVCache(), RotatingKVCache(max_size=8))

    def append(start, count):
        rows = mx.arange(start, start + count, dtype=mx.float32).reshape(1, 1, count, 1)
        return [part.update_and_fetch(rows, -rows) for part in cache.caches]

    append(0, 7)
    transaction = Transaction([cache], 4)
    append(7, 4)
    transaction.commit([2], [None])
    assert num_cached([cache]) == 9
    (keys, _), (ring, _) = append(100, 2)
    assert keys.flatten().tolist() == [*range(9), 100, 101]
    assert ring.flatten().tolist() == [2, 3, 4, 5, 6, 7, 8, 100, 101]


def test_a_partly_kept_recurrent_pass_needs_its_record():
    target = bind(make_model("qwen3_5"))
    cache = target.make_cache()
    transaction = Transaction(cache, ROWS)
    out = run(target, cache, [1] * ROWS)
    with pytest.raises(RuntimeError, match="unrecorded"):
        transaction.commit([2], out.records)


class Untrimmable(KVCache):
    def is_trimmable(self):
        return False


@pytest.mark.parametrize(
    "cache",
    [Untrimmable(), ChunkedKVCache(8), ConcatenateKVCache(), CacheList(Untrimmable())],
    ids=lambda cache: type(cache).__name__,
)
def test_unknown_caches_are_refused_by_name(cache):
    """ConcatenateKVCache forgets a trim at the next append."""
    fresh = [KVCache(), CacheList(KVCache()) if isinstance(cache, CacheList) else KVCache()]
    with pytest.raises(ValueError, match=r"(Untrimmable|Chunked|Concat).*RotatingKVCache"):
        check_caches([KVCache(), cache], fresh)


@pytest.mark.parametrize(
    "given, message",
    [
        ([], "is empty, as after an interruption"),
        ([KVCache()], "has 1 caches but the target has 2"),
        ([KVCache(), KVCache()], "Cache 1 of the prompt cache is KVCache but .* ArraysCache"),
        ([ArraysCache(2), ArraysCache(2)], "Cache 0 .* is ArraysCache but .* KVCache"),
    ],
    ids=["empty", "short", "attending", "recurrent"],
)
def test_caches_of_another_model_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        check_caches(given, [KVCache(), ArraysCache(2)])


def test_quantised_and_rotating_caches_stand_for_plain_ones():
    check_caches([QuantizedKVCache(), RotatingKVCache(8)], [KVCache(), KVCache()])
