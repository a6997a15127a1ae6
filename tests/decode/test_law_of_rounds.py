"""Several rounds together follow the target's law: tokens of one round do not tell the next's."""

import itertools

import mlx.core as mx
import numpy as np
import pytest

from mlx_dflash2.decode import judge as judge_module
from mlx_dflash2.decode.judge import Judge
from mlx_dflash2.decode.sampling import make_sampler
from mlx_dflash2.drafter import Proposal

# A target and a drafter whose next token depends on the one before: rows of probabilities.
TARGET = np.array([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6], [0.1, 0.7, 0.2]])
DRAFTER = np.array([[0.2, 0.6, 0.2], [0.5, 0.3, 0.2], [0.4, 0.3, 0.3]])
FIRST, TOKENS, DRAFTS, DRAWS = 0, 4, 2, 2500
# Cells of the joint law less one, and its standard deviation.
CELLS = 3**TOKENS - 1


def draft(anchor: int, key: mx.array) -> Proposal:
    """Walk as the selector does: a number of the key for each position."""
    uniforms = np.array(mx.random.uniform(shape=(DRAFTS,), key=key))
    tokens, before = [], anchor
    for number in uniforms:
        before = int(np.searchsorted(np.cumsum(DRAFTER[before])[:-1], number, side="right"))
        tokens.append(before)
    rows = [anchor, *tokens][:DRAFTS]
    ids = mx.broadcast_to(mx.arange(3, dtype=mx.uint32), (DRAFTS, 3))
    q = mx.array(DRAFTER[rows].astype(np.float32))
    return Proposal(mx.array(tokens, mx.uint32), mx.array(True), ids, q)


def rounds(judge: Judge) -> list[int]:
    """The first tokens after ``FIRST``, from as many rounds as they take."""
    emitted = [FIRST]
    while len(emitted) <= TOKENS:
        proposal = draft(emitted[-1], judge.draft_key())
        rows = [emitted[-1], *proposal.tokens.tolist()]
        logits = mx.array(np.log(TARGET[rows]).astype(np.float32))
        host, _ = judge.at_once(proposal, logits, None)
        count, _, _, *tokens = host.tolist()
        emitted += tokens[: count + 1]
    return emitted[1 : TOKENS + 1]


def chi_square(judges) -> float:
    """Deviation of the joint law of the first tokens, in standard deviations of its statistic."""
    cells = list(itertools.product(range(3), repeat=TOKENS))
    expected = {
        cell: DRAWS * np.prod([TARGET[a, b] for a, b in itertools.pairwise((FIRST, *cell))])
        for cell in cells
    }
    found = dict.fromkeys(cells, 0)
    for judge in judges:
        found[tuple(rounds(judge))] += 1
    statistic = sum((found[cell] - expected[cell]) ** 2 / expected[cell] for cell in cells)
    return (statistic - CELLS) / np.sqrt(2 * CELLS)


def judges():
    return (Judge(make_sampler(1.0), seed=seed) for seed in range(DRAWS))


def test_the_joint_law_of_the_first_tokens():
    assert abs(chi_square(judges())) < 4


class SameKeyAgain(Judge):
    """The key never moves on from round to round."""

    def _round_keys(self, key):
        keys = super()._round_keys(key)
        self.key = key
        return keys


class OneKeyForDraftAndDraw(Judge):
    def _round_keys(self, key):
        draft, filter_key, accept, _ = super()._round_keys(key)
        return [draft, filter_key, accept, draft]


class OneKeyForDraftAndAcceptance(Judge):
    def _round_keys(self, key):
        draft, filter_key, _, draw = super()._round_keys(key)
        return [draft, filter_key, draft, draw]


@pytest.mark.parametrize("broken", [SameKeyAgain, OneKeyForDraftAndAcceptance])
def test_dependent_keys_are_caught(broken):
    made = (broken(make_sampler(1.0), seed=seed) for seed in range(DRAWS))
    assert chi_square(made) > 6


def test_drafts_without_a_distribution_count_as_certain(monkeypatch):
    """A draft that is always the same: counted as drawn at random, it would be kept too often."""

    def certain(anchor, key):
        return Proposal(mx.array([1] * DRAFTS, mx.uint32), mx.array(True))

    monkeypatch.setitem(globals(), "draft", certain)
    assert abs(chi_square(judges())) < 4
    ones = mx.ones
    monkeypatch.setattr(judge_module.mx, "ones", lambda shape: ones(shape) / 2)
    assert chi_square(judges()) > 6


def test_the_keys_of_a_round_are_all_different():
    judge, seen = Judge(make_sampler(1.0), seed=3), set()
    for _ in range(5):
        proposal = draft(0, judge.draft_key())
        keys = [tuple(key.tolist()) for key in judge._round_keys(judge.key)]
        assert len({*keys, *seen}) == len(seen) + 4
        seen |= set(keys)
        judge.at_once(proposal, mx.array(np.log(TARGET[[0, 1, 2]]).astype(np.float32)), None)
