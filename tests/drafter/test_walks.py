"""The paths that tools/walks.py compares, against all paths there are."""

from itertools import product

import mlx.core as mx
import numpy as np
from support.tiny import DENSE, make_drafter, make_model

from mlx_dflash2.kernels import path_walk
from mlx_dflash2.targets import bind
from mlx_dflash2.train.corpus import Corpus
from tools import walks

L, K = 3, 4


def scores_of(count: int) -> np.ndarray:
    scores = 2 * np.random.default_rng(3).standard_normal((count, L, K, K))
    # Whatever comes before the first position is the anchor.
    scores[:, 0] = scores[:, 0, :1]
    return scores


def expectation(steps: np.ndarray, path) -> float:
    """Expected accepted drafts of one path, as a sum of the chances that each one stays."""
    before = (0, *path[:-1])
    chances = [steps[t, s, c] for t, (s, c) in enumerate(zip(before, path, strict=True))]
    return float(np.cumprod(chances).sum())


def test_no_path_is_expected_to_keep_more_drafts():
    steps = walks.steps_of(scores_of(40))
    np.testing.assert_allclose(steps.sum(axis=-1), 1)
    paths = walks.expected(steps)
    assert paths.shape == (40, L)
    for own, path in zip(steps, paths, strict=True):
        others = [expectation(own, other) for other in product(range(K), repeat=L)]
        assert expectation(own, path) >= max(others) - 1e-12
    differs = (paths != walks.greedy(steps)).any(axis=1)
    assert 0 < differs.sum() < 40


def test_the_greedy_path_is_the_drafters_own():
    scores = scores_of(9)
    candidates = mx.arange(9 * L * K).reshape(9, L, K)
    walk = path_walk(mx.array(scores.astype(np.float32)), candidates)
    assert walks.greedy(walks.steps_of(scores)).tolist() == walk.choices.tolist()


def test_rounds_of_texts_are_counted_by_each_rule(tmp_path):
    model, drafter = make_model(DENSE), make_drafter()
    tokens = np.array(mx.random.randint(0, 500, (50,), key=mx.random.key(1)))
    shard = {"tokens": tokens, "lengths": [30, 20], "prompt_lengths": [4, 5]}
    np.savez(tmp_path / "shard-0.npz", **shard, kinds=["a", "b"])
    found = walks.compare(drafter, bind(model), Corpus(tmp_path))
    assert found["prompts"] == 2 and found["num_anchors"] == 25 + 14
    assert set(found["rules"]) == {"greedy", "expected", "expected, candidates' share"}
    for rule in found["rules"].values():
        assert 1 <= rule["acceptance_length"] <= 8 and rule["gain_interval"][0] <= rule["gain"]
    assert found["rules"]["greedy"]["gain"] == 0
