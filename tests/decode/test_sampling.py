"""Sampled tokens follow the target's own distribution, whatever the drafter proposes.

The target here is a table: row a holds the logits of the token after a. A round is drawn 20,000
times at once, and what it emits is compared with the exact law.
"""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import sample_utils

from mlx_dflash2.decode.accept import accept_sampled, draw, residual
from mlx_dflash2.decode.sampling import Sampling, make_sampler
from mlx_dflash2.kernels.path_walk import path_walk_ops

V, K, L, DRAWS, ANCHOR = 32, 8, 3, 20_000, 5

FILTERS = {
    "plain": {},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "xtc": {"xtc_probability": 0.5, "xtc_threshold": 0.1},
}
TEMPERATURES = (0.3, 0.7, 1.5)


def table() -> mx.array:
    """Log probabilities [V, V] of the target."""
    logits = 2.0 * mx.random.normal((V, V), key=mx.random.key(1))
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def mlx_lm_law(logprobs: np.ndarray, sampling: Sampling) -> np.ndarray:
    """What mlx-lm's own sampler draws from a row: its filters, in its order; XTC as a mixture."""

    def law(xtc: bool) -> np.ndarray:
        x = mx.array(logprobs)[None]
        if sampling.top_p:
            x = sample_utils.apply_top_p(x, sampling.top_p)
        if sampling.min_p:
            x = sample_utils.apply_min_p(x, sampling.min_p)
        if xtc:
            x = sample_utils.apply_xtc(x, 1.0, sampling.xtc_threshold, [])
        if sampling.top_k:
            x = sample_utils.apply_top_k(x, sampling.top_k)
        x = np.array(x[0], dtype=np.float64) / sampling.temp
        e = np.exp(x - x.max())
        return e / e.sum()

    share = sampling.xtc_probability
    return (1 - share) * law(False) + (share * law(True) if share else 0.0)


@dataclass
class Drafts:
    """20,000 proposals: tokens [N, L], candidates and q [N, L, K], and what drew them [N, L]."""

    tokens: mx.array
    candidates: mx.array
    q: mx.array
    uniforms: mx.array


def draw_drafts(kind: str, sampling: Sampling, key: mx.array) -> Drafts:
    """``good`` drafts as the target would, ``bad`` from elsewhere, ``one-hot`` always the same."""
    logprobs = table()
    ids = mx.argsort(-logprobs[ANCHOR])[:K].astype(mx.uint32)
    if kind == "bad":
        scores = 2.0 * mx.random.normal((L, K, K), key=mx.random.key(2))
    else:
        chain = logprobs[ids][:, ids]
        first = mx.broadcast_to(logprobs[ANCHOR, ids], (K, K))
        scores = mx.stack([first, chain, chain])
    scores = mx.broadcast_to(scores, (DRAWS, L, K, K))
    candidates = mx.broadcast_to(ids, (DRAWS, L, K))
    uniforms = mx.random.uniform(shape=(DRAWS, L), key=key)
    if kind == "one-hot":
        tokens, _, _ = path_walk_ops(scores, candidates)
        return Drafts(tokens, tokens[..., None], mx.ones((DRAWS, L, 1)), uniforms)
    tokens, _, q = path_walk_ops(scores, candidates, sampling.temp, uniforms)
    return Drafts(tokens, candidates, q, uniforms)


def target_rows(drafts: Drafts, sampling: Sampling, key: mx.array) -> mx.array:
    """The target's distributions [N, L + 1, V] after the anchor and after each draft."""
    anchor = mx.full((DRAWS, 1), ANCHOR, mx.uint32)
    rows = table()[mx.concatenate([anchor, drafts.tokens], axis=1)]
    return sampling.probs(rows.reshape(-1, V), key).reshape(DRAWS, L + 1, V)


def emitted(drafts: Drafts, p: mx.array, accept: Callable, seed: int = 0):
    """Accepted counts [N] and tokens [N, L + 1] of all rounds."""
    keys = mx.random.split(mx.random.key(100 + seed), 2 * DRAWS).reshape(2, DRAWS, -1)
    inputs = (drafts.tokens, drafts.candidates, drafts.q, p, keys[0], keys[1])
    if accept is shared_noise:
        inputs += (drafts.uniforms,)
    num_accepted, tokens = mx.vmap(accept)(*inputs)
    return np.array(num_accepted), np.array(tokens)


def distance(tokens: np.ndarray, law: np.ndarray) -> float:
    """How many sigmas the total variation of the draws lies above what chance gives."""
    n = len(tokens)
    variation = 0.5 * np.abs(np.bincount(tokens, minlength=V) / n - law).sum()
    variance = law * (1 - law) / n
    expected = 0.5 * np.sqrt(2 / np.pi * variance).sum()
    sigma = 0.5 * np.sqrt((1 - 2 / np.pi) * variance.sum())
    return (variation - expected) / max(sigma, 1e-12)


def chi_square(tokens: np.ndarray, law: np.ndarray) -> float:
    """The statistic's distance from its mean, in sigmas; rare tokens are pooled."""
    counts, expected = np.bincount(tokens, minlength=V), len(tokens) * law
    if counts[law == 0].any():
        return np.inf
    rare = expected < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], max(expected[rare].sum(), 1e-9))
    freedom = max((expected > 1).sum() - 1, 1)
    statistic = ((counts - expected) ** 2 / np.maximum(expected, 1.0)).sum()
    return (statistic - freedom) / np.sqrt(2 * freedom)


def deviations(drafts: Drafts, p: mx.array, sampling: Sampling, accept: Callable):
    """Sigmas by which the round's law is missed: in all, after acceptance, after rejection."""
    num_accepted, tokens = emitted(drafts, p, accept)
    laws = np.stack([mlx_lm_law(row, sampling) for row in np.array(table())])
    found = {"first token": (tokens[:, 0], laws[ANCHOR])}
    # Given that it comes in the same round, the second token follows its predecessor's row.
    second = tokens[num_accepted >= 1]
    common = np.bincount(second[:, 0], minlength=V).argmax() if len(second) else 0
    after = second[second[:, 0] == common, 1]
    if len(after) > 500:
        found["second token"] = (after, laws[common])
    if not sampling.xtc_probability:
        # After a rejection at position 1 the token follows max(p - q, 0), whatever was drafted.
        left = laws[ANCHOR].copy()
        ids, q = np.array(drafts.candidates[0, 0]), np.array(drafts.q[0, 0])
        left[ids] = np.maximum(left[ids] - q, 0)
        rejected = tokens[num_accepted == 0, 0]
        if len(rejected) > 500:
            found["after rejection"] = (rejected, left / left.sum())
    return {name: max(distance(*x), chi_square(*x)) for name, x in found.items()}


@pytest.mark.parametrize("kind", ["good", "bad", "one-hot"])
@pytest.mark.parametrize("temp", TEMPERATURES)
@pytest.mark.parametrize("name", FILTERS)
def test_the_law_of_a_round(name, temp, kind):
    sampling = make_sampler(temp=temp, **FILTERS[name])
    keys = mx.random.split(mx.random.key(7), 2)
    drafts = draw_drafts(kind, sampling, keys[0])
    found = deviations(drafts, target_rows(drafts, sampling, keys[1]), sampling, accept_sampled)
    assert len(found) >= 1 and max(found.values()) < 5, found


def shared_noise(drafts, candidates, q, p, accept_key, draw_key, uniforms):
    """The number that drew a draft also draws what replaces it."""
    num_accepted, tokens = accept_sampled(drafts, candidates, q, p, accept_key, draw_key)
    left = residual(p[:1], candidates[:1], q[:1])
    reached = uniforms[:1, None] * left.sum() >= mx.cumsum(left, axis=-1)
    token = mx.minimum(reached.sum(axis=-1), V - 1).astype(mx.uint32)
    at = (mx.arange(L + 1) == 0) & (num_accepted == 0)
    return num_accepted, mx.where(at, token, tokens)


def q_of_another_row(drafts, candidates, q, p, accept_key, draw_key):
    return accept_sampled(drafts, candidates, mx.roll(q, 1, axis=0), p, accept_key, draw_key)


def residual_without_q(drafts, candidates, q, p, accept_key, draw_key):
    num_accepted, tokens = accept_sampled(drafts, candidates, q, p, accept_key, draw_key)
    row = mx.take(p, num_accepted[None], axis=0)
    token = draw(row, draw_key).astype(mx.uint32)
    at = mx.arange(L + 1) == num_accepted
    return num_accepted, mx.where(at, token, tokens)


def stale_q(drafts, candidates, q, p, accept_key, draw_key):
    """What an earlier round left behind in a reused buffer."""
    stale = mx.concatenate([q[:, 4:] * 0.5, q[:, :4] * 0.5], axis=1)
    return accept_sampled(drafts, candidates, q + stale, p, accept_key, draw_key)


@pytest.mark.parametrize(
    "mutant",
    [shared_noise, q_of_another_row, residual_without_q, stale_q],
    ids=lambda m: m.__name__,
)
def test_broken_acceptance_is_caught(mutant):
    """The net holds: each classic fault moves the law by many sigmas."""
    sampling = make_sampler(temp=0.7)
    worst = 0.0
    for kind in ("good", "bad"):
        keys = mx.random.split(mx.random.key(7), 2)
        drafts = draw_drafts(kind, sampling, keys[0])
        p = target_rows(drafts, sampling, keys[1])
        worst = max(worst, *deviations(drafts, p, sampling, mutant).values())
    assert worst > 10


def test_acceptance_by_hand():
    """p = [.5, .3, .2, 0], q = [.7, .3] over ids 0 and 3: draft 0 stays below u = .714."""
    p, candidates = mx.array([[0.5, 0.3, 0.2, 0]] * 2), mx.array([[0, 3]], dtype=mx.uint32)
    q = mx.array([[0.7, 0.3]])
    keys = mx.random.split(mx.random.key(3), 8000).reshape(2, 4000, -1)

    def accept(draft):
        def one(a, b):
            return accept_sampled(mx.array([draft], dtype=mx.uint32), candidates, q, p, a, b)

        num_accepted, tokens = mx.vmap(one)(keys[0], keys[1])
        return np.array(num_accepted), np.array(tokens)

    counts, tokens = accept(0)
    assert abs(counts.mean() - 5 / 7) < 0.03
    assert set(tokens[counts == 0, 0]) == {1, 2}
    assert abs((tokens[counts == 0, 0] == 1).mean() - 0.6) < 0.05
    counts, tokens = accept(3)
    assert counts.max() == 0 and abs((tokens[:, 0] == 1).mean() - 0.6) < 0.05


def test_the_bonus_row_follows_p_alone():
    # If the last draft's q were subtracted here, only the third token would be left.
    candidates, q = mx.array([[0, 1]]), mx.array([[0.5, 0.5]])
    p = mx.array([[0.5, 0.5, 0.0], [0.4, 0.4, 0.2]])
    bonuses = []
    for seed in range(100):
        keys = mx.random.split(mx.random.key(seed))
        accepted, tokens = accept_sampled(mx.array([seed % 2]), candidates, q, p, *keys)
        assert accepted.item() == 1
        bonuses.append(tokens[1].item())
    assert bonuses.count(0) > 20 and bonuses.count(1) > 20


def test_equal_distributions_never_reject():
    p = mx.array([[1.0, 0, 0, 0]] * 2)
    candidates, q = mx.array([[0, 3]], dtype=mx.uint32), mx.array([[1.0, 0]])
    draft = mx.array([0], dtype=mx.uint32)
    for seed in range(50):
        keys = mx.random.split(mx.random.key(seed), 2)
        assert accept_sampled(draft, candidates, q, p, *keys)[0].item() == 1


@pytest.mark.parametrize("temp", TEMPERATURES)
@pytest.mark.parametrize("name", FILTERS)
def test_probs_are_mlx_lms(name, temp):
    sampling = make_sampler(temp=temp, **FILTERS[name], xtc_special_tokens=[])
    rows = table()
    repeats = 4000 if name == "xtc" else 1
    many = sampling.probs(mx.repeat(rows, repeats, axis=0), mx.random.key(0))
    mean = np.array(many.reshape(V, repeats, V).mean(axis=1))
    expected = np.stack([mlx_lm_law(row, sampling) for row in np.array(rows)])
    np.testing.assert_allclose(mean, expected, atol=0.04 if name == "xtc" else 2e-6)


@pytest.mark.parametrize("name", FILTERS)
def test_calling_a_sampling_is_calling_mlx_lms_sampler(name):
    mx.random.seed(3)
    ours = [make_sampler(temp=0.7, **FILTERS[name])(table()[3:4]).item() for _ in range(20)]
    mx.random.seed(3)
    theirs = sample_utils.make_sampler(temp=0.7, **FILTERS[name])
    assert ours == [theirs(table()[3:4]).item() for _ in range(20)]


@pytest.mark.parametrize(
    "name, value",
    [
        ("temp", -0.1),
        ("top_p", 1.1),
        ("min_p", -1),
        ("min_tokens_to_keep", 0),
        ("top_k", -1),
        ("top_k", 2.5),
        ("min_tokens_to_keep", 1.5),
        ("xtc_probability", 2),
        ("xtc_threshold", 0.6),
    ],
)
def test_settings_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=f"`{name}` is {value} but has to be (from|an integer)"):
        make_sampler(**{"temp": 1.0, name: value})
