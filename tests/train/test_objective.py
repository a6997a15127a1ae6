"""The loss of a batch against one computed from decoding's own numbers."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map
from support.tiny import DENSE, SLIDING, VOCAB, make_drafter, make_model

from mlx_dflash2.drafter.logits import transform
from mlx_dflash2.drafter.model import Drafter
from mlx_dflash2.evaluation.teacher_forced import DraftQuality, TextPass, measure_drafts
from mlx_dflash2.targets import bind
from mlx_dflash2.train.blocks import run_blocks
from mlx_dflash2.train.objective import Batch, Objective
from mlx_dflash2.train.vocabulary import FullVocabulary

LENGTHS, LAYERS = (26, 17), [1, 3]
# So many that random texts have labels among them and labels that are not.
CANDIDATES = 200
# The second text has two anchors alone, and both have rows behind its end.
ANCHORS = [[2, 9, 20, 24], [12, 14, 0, 0]]
USED = [[True] * 4, [True, True, False, False]]


@pytest.fixture(scope="module", params=[DENSE, SLIDING])
def setup(request):
    """A target, a drafter, a batch of both labels, and what decoding says of its blocks."""
    mx.random.seed(3)
    target, drafter = bind(make_model(request.param)), make_drafter(9, selector_top_k=CANDIDATES)
    tokens = mx.random.randint(1, VOCAB, (2, 40)).astype(mx.uint32)
    parts = []
    for row, (anchors, used) in enumerate(zip(ANCHORS, USED, strict=True)):
        text = TextPass(target, tokens[row].tolist(), 1, LAYERS)
        parts.append(
            measure_drafts(drafter, text, [a for a, u in zip(anchors, used, strict=True) if u])
        )
    inside = mx.arange(40) < mx.array(LENGTHS)[:, None]
    tokens = mx.where(inside, tokens, 0).astype(mx.uint32)[:, :26]
    shown = target.forward(tokens, target.make_cache(), LAYERS)
    arrays = mx.array(LENGTHS), mx.array(ANCHORS), mx.array(USED)
    batch = Batch(tokens, shown.taps, shown.hidden, *arrays)
    return target, drafter, batch, DraftQuality.joined(parts)


def valid_rows() -> np.ndarray:
    """Of the used anchors, rows that are within their text."""
    at = np.array([[a + 1 + j for j in range(7)] for a in (*ANCHORS[0], *ANCHORS[1][:2])])
    return at < np.array([LENGTHS[0]] * 4 + [LENGTHS[1]] * 2)[:, None]


def decayed(gamma: float, valid: np.ndarray) -> np.ndarray:
    return np.exp(-np.arange(7) / gamma) * valid


def paced(right: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """D-PACE's weights by their definition, a row at a time."""
    weights = np.zeros(valid.shape)
    for block in range(len(valid)):
        prefix, product = np.zeros(7), 1.0
        for j in range(7):
            if valid[block, j]:
                product *= 0.5 * right[block, j] + 0.5
                prefix[j] = product
        for j in range(7):
            weights[block, j] = prefix[j:].sum() * valid[block, j]
    return weights


def loss_of(objective: Objective, setup, **changes) -> tuple[float, dict]:
    target, drafter, batch, _ = setup
    batch = batch._replace(**changes)
    vocabulary = FullVocabulary(target, drafter.args)
    loss, counts = objective(drafter.train(), target, vocabulary, batch)
    return loss.item(), {name: value.tolist() for name, value in counts.items()}


@pytest.mark.parametrize("gamma", [4.0, 1.5, None], ids=str)
@pytest.mark.parametrize("weight", [0.0, 1.0, 0.3])
def test_hard_loss_is_decoding_s_log_probability(gamma, weight, setup):
    """Of the true token, and of the selector's choice of it where it is a candidate."""
    forced, valid = setup[3], valid_rows()
    assert 0.2 < forced.among.mean() < 0.8
    right = np.where(forced.among, np.exp(np.nan_to_num(forced.selector_logprob)), 0)
    choice = -np.where(forced.among, np.nan_to_num(forced.selector_logprob), 0)
    if gamma is None:
        unary = (-forced.logprob * paced(np.exp(forced.logprob), valid)).sum() / len(valid)
        weights = paced(right, valid) * forced.among
        selector = (choice * weights).sum() / len(valid)
    else:
        weights = decayed(gamma, valid)
        unary = (-forced.logprob * weights).sum() / weights.sum()
        weights = weights * forced.among
        selector = (choice * weights).sum() / max(weights.sum(), 1e-6)
    found, _ = loss_of(Objective(gamma=gamma, selector_weight=weight), setup, final=None)
    assert found == pytest.approx(unary + weight * selector, rel=1e-5)


def test_counts_are_decoding_s(setup):
    forced, valid = setup[3], valid_rows()
    _, counts = loss_of(Objective(), setup, final=None)
    for name in ("best", "among", "chosen"):
        assert counts[name] == (getattr(forced, name) & valid).sum(axis=0).tolist()
    assert counts["rows"] == valid.sum(axis=0).tolist()
    for name in ("best", "chosen"):
        prefix = np.cumprod(getattr(forced, name) & valid, axis=1).sum(axis=0)
        assert counts[f"{name}_prefix"] == prefix.tolist()


@pytest.mark.parametrize("checkpoint", [False, True])
def test_shorter_blocks_leave_out_the_last_rows(checkpoint, setup):
    """The rows that are left see what a drafter sees that is asked for so few."""
    _, drafter, batch, _ = setup
    _, whole = loss_of(Objective(), setup)
    loss, counts = loss_of(Objective(block_size=4, checkpoint=checkpoint), setup)
    assert counts["rows"] == whole["rows"][:3]
    short = replace(drafter.args, block_size=4)
    served = Drafter(short)
    served.update(drafter.parameters())
    expected, found = loss_of(Objective(), (setup[0], served, batch, None))
    assert loss == pytest.approx(expected, rel=1e-6) and counts == found


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def test_soft_loss_is_against_the_target_where_it_predicts_the_label(setup):
    target, drafter, batch, _ = setup
    hidden = run_blocks(drafter.train(), target, batch.tokens, batch.taps, batch.anchors)
    logits = np.array(transform(target.head(hidden), drafter.args))
    wanted = np.exp(log_softmax(np.array(target.model(batch.tokens))))
    tokens, costs, choices, weights = np.array(batch.tokens), [], [], []
    selector = drafter.candidate_selector
    for row, column in [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]:
        for j in range(7):
            at = ANCHORS[row][column] + 1 + j
            if at >= LENGTHS[row]:
                continue
            draft, p = logits[row, column, j], wanted[row, at - 1]
            costs.append(-(p * log_softmax(draft)).sum())
            best = np.argsort(-draft)[:CANDIDATES]
            gate = selector.hidden_projection(hidden[row, column, j])
            gate = gate * selector.predecessor_codebook(batch.tokens[row, at - 1])
            scores = draft[best] + np.array(selector.successor_codebook(mx.array(best)) @ gate)
            among = tokens[row, at] in best
            choices.append(-(p[best] * log_softmax(scores)).sum() * among)
            weights.append((np.exp(-j / 4), np.exp(-j / 4) * among))
    every, chosen = np.array(weights).T
    expected = (np.array(costs) * every).sum() / every.sum()
    expected += (np.array(choices) * every).sum() / max(chosen.sum(), 1e-6)
    assert loss_of(Objective(), setup)[0] == pytest.approx(expected, rel=1e-5)


def gradients_of(objective: Objective, setup) -> dict[str, mx.array]:
    target, drafter, batch, _ = setup
    weights = tree_map(mx.array, drafter.trainable_parameters())

    def loss(weights):
        drafter.update(weights)
        return objective(drafter, target, FullVocabulary(target, drafter.args), batch)[0]

    gradients = mx.grad(loss)(weights)
    mx.eval(gradients)
    drafter.update(weights)
    return dict(tree_flatten(gradients))


@pytest.mark.parametrize("gamma", [4.0, None], ids=["gamma", "d-pace"])
def test_a_detached_selector_trains_itself_alone(gamma, setup):
    detached = gradients_of(Objective(gamma=gamma, detach_selector=True), setup)
    whole = gradients_of(Objective(gamma=gamma), setup)
    unary = gradients_of(Objective(gamma=gamma, selector_weight=0.0), setup)
    for name, gradient in detached.items():
        own = name.startswith("candidate_selector")
        expected = whole[name] if own else unary[name]
        assert mx.allclose(gradient, expected, rtol=1e-4, atol=1e-6).item(), name
    assert not mx.allclose(whole["fc.weight"], unary["fc.weight"], rtol=1e-2, atol=1e-6).item()


def test_ids_that_may_not_be_drafted_are_no_labels(setup):
    """Their rows do not count; those after them, which have such an id before them, do."""
    target, drafter, batch, _ = setup
    vocabulary = FullVocabulary(target, replace(drafter.args, selector_vocab_size=256))
    _, counts = Objective()(drafter.train(), target, vocabulary, batch)
    tokens, rows = np.array(batch.tokens), np.zeros(7, int)
    for row, column in [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]:
        label = ANCHORS[row][column] + 1 + np.arange(7)
        inside = label < LENGTHS[row]
        rows += inside & (tokens[row, np.where(inside, label, 0)] < 256)
    assert counts["rows"].tolist() == rows.tolist()
