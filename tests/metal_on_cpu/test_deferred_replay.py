"""Verify passes of a recurrent target whose states the kernel brings up to date in passing."""

import mlx.core as mx
import pytest
from mlx.utils import tree_map
from support.tiny import VOCAB, cache_arrays, make_model

from mlx_dflash2.decode.rollback import Transaction
from mlx_dflash2.targets import bind

ROWS = 4


@pytest.fixture
def verifying(kernels):
    """The bench, fast: the kernel itself is checked elsewhere."""
    kernels.mode = "fast"
    return kernels


def copy(value):
    return mx.array(value) if isinstance(value, mx.array) else value


def follow(target, cache, tokens):
    return target.logits(target.forward(mx.array([tokens]), cache).hidden)


def verify(target, cache, tokens, keep):
    """One round: run the rows, then keep the first ``keep`` of them; their logits."""
    transaction = Transaction(cache, len(tokens))
    out = target.forward(mx.array([tokens]), cache, record=True)
    transaction.commit([keep], out.records)
    return target.logits(out.hidden)


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_next"])
@pytest.mark.parametrize("prompt", [0, 5])
def test_rounds_equal_single_steps(verifying, kind, prompt):
    """Whatever is kept of each round, the next one sees what single steps would have left."""
    target = bind(make_model(kind))
    cache, fresh = target.make_cache(), target.make_cache()
    tokens = mx.random.randint(0, VOCAB, (60,)).tolist()
    if prompt:
        follow(target, cache, tokens[:prompt])
        follow(target, fresh, tokens[:prompt])
    at, rounds = prompt, (2, ROWS, 1, 3, 0, ROWS, 2)
    for keep in rounds:
        logits = verify(target, cache, tokens[at : at + ROWS], keep)
        for i in range(keep):
            expected = follow(target, fresh, tokens[at + i : at + i + 1])
            assert mx.allclose(logits[:, i : i + 1], expected, atol=2e-5).item()
        at += keep
    recurrent = sum(target.is_recurrent(i) for i in range(len(target.layers)))
    # The choice takes a launch of its own; so does a replay here, as the bench is not lazy.
    replays = sum(keep > 0 for keep in rounds)
    launches = verifying.launched.count("gated_delta_verify")
    assert launches == recurrent * (len(rounds) + replays) + 1
    for ours, theirs in zip(cache_arrays(cache), cache_arrays(fresh), strict=True):
        assert mx.allclose(ours, theirs, atol=2e-5).item()


def test_a_pass_changes_no_recurrent_cache_before_it_is_committed(verifying):
    """The state of all rows is not even built: few passes keep them all."""
    target = bind(make_model("qwen3_5"))
    cache = target.make_cache()
    follow(target, cache, [1, 2, 3])
    before = [tuple(layer.cache) for layer in cache if hasattr(layer, "cache")]
    target.forward(mx.array([[4, 5, 6]]), cache, record=True)
    after = [tuple(layer.cache) for layer in cache if hasattr(layer, "cache")]
    assert before and all(
        x is y for a, b in zip(before, after, strict=True) for x, y in zip(a, b, strict=True)
    )


def test_a_plain_step_sees_the_state_that_was_left_to_be_replayed(verifying):
    target = bind(make_model("qwen3_5"))
    cache, fresh = target.make_cache(), target.make_cache()
    verify(target, cache, [1, 2, 3, 4], 2)
    for token in (1, 2):
        follow(target, fresh, [token])
    assert mx.allclose(follow(target, cache, [9]), follow(target, fresh, [9]), atol=2e-5).item()
    # Its state is the model's own again; the next round takes that.
    logits = verify(target, cache, [5, 6, 7], 1)
    assert mx.allclose(logits[:, :1], follow(target, fresh, [5]), atol=2e-5).item()


def test_a_state_that_someone_replaced_is_taken_as_it_is(verifying):
    """The cache is the truth: a record is used only if its state is still in there."""
    target = bind(make_model("qwen3_5"))
    cache, fresh = target.make_cache(), target.make_cache()
    verify(target, cache, [1, 2, 3, 4], 2)
    follow(target, fresh, [7, 8])
    for ours, theirs in zip(cache, fresh, strict=True):
        ours.state = tree_map(copy, theirs.state)
    logits = verify(target, cache, [5, 6], 1)
    assert mx.allclose(logits[:, :1], follow(target, fresh, [5]), atol=2e-5).item()


def test_records_die_with_their_cache(verifying):
    target = bind(make_model("qwen3_5"))
    cache = target.make_cache()
    verify(target, cache, [1, 2, 3, 4], 2)
    assert len(target.records) > 0
    del cache
    assert len(target.records) == 0
