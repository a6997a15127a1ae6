"""What a row costs and counts, and a sampled vocabulary in place of the whole one."""

from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.tuner.lora import LoRALinear
from support.tiny import CONFIGS, DENSE, HIDDEN, SLIDING, VOCAB, drafter_config, make_model

from mlx_dflash2.drafter.args import DrafterArgs
from mlx_dflash2.targets import bind
from mlx_dflash2.train.losses import (
    d_pace_weights,
    position_weights,
    selector_loss,
    unary_loss,
    weighted_mean,
)
from mlx_dflash2.train.options import LOSSES
from mlx_dflash2.train.vocabulary import FullVocabulary, SampledVocabulary, most_frequent

ARGS = DrafterArgs.from_dict(drafter_config())
CAPPED = replace(ARGS, output_multiplier=0.7, final_logit_softcapping=5.0)


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def close(found: mx.array, expected, tolerance: float = 1e-5):
    np.testing.assert_allclose(np.array(found), expected, rtol=tolerance, atol=tolerance)


# Weights.


def test_position_weights_decay_from_the_first_row():
    expected = [1, 0.778801, 0.606531, 0.472367, 0.367879, 0.286505, 0.223130]
    close(position_weights(7, 4.0), expected, 1e-6)


def test_d_pace_weights():
    right = mx.array([[0.8, 0.5, 0.25]])
    close(d_pace_weights(right, mx.ones((1, 3), mx.bool_)), [[1.996875, 1.096875, 0.421875]], 1e-6)


@pytest.mark.parametrize("masked", range(4))
def test_a_masked_row_passes_the_product_on_and_counts_nothing(masked):
    """The others weigh what they weigh without it, whatever is in it."""
    right = np.array([[0.8, 0.5, 0.25]], np.float32)
    wider = mx.array(np.insert(right, masked, 0.0, axis=1))
    valid = mx.arange(4)[None] != masked
    expected = np.insert([[1.996875, 1.096875, 0.421875]], masked, 0.0, axis=1)
    close(d_pace_weights(wider, valid), expected, 1e-6)


def test_d_pace_smoothing_keeps_later_rows_alive():
    """A row that is surely wrong takes the share ``1 - a`` from those after it, not all."""
    right, valid = mx.array([[0.0, 1.0]]), mx.ones((1, 2), mx.bool_)
    close(d_pace_weights(right, valid, 0.5), [[1.0, 0.5]])
    close(d_pace_weights(right, valid, 0.0), [[0.0, 0.0]])


def test_d_pace_weights_have_no_gradient():
    valid = mx.ones((1, 3), mx.bool_)
    slope = mx.grad(lambda right: d_pace_weights(right, valid).sum())(mx.full((1, 3), 0.5))
    assert slope.tolist() == [[0.0, 0.0, 0.0]]


def test_weighted_mean_of_nothing_is_zero():
    costs = mx.array([1.0, 2.0])
    assert weighted_mean(costs, mx.zeros(2)).item() == 0
    assert mx.grad(lambda c: weighted_mean(c, mx.zeros(2)))(costs).tolist() == [0.0, 0.0]
    assert weighted_mean(costs, mx.array([1.0, 3.0])).item() == pytest.approx(1.75)


# Costs of a row.


def reference(kind: str, draft: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    p, q = wanted, np.exp(draft)
    cross = -(p * draft).sum(axis=-1)
    entropy = -(p * np.log(np.where(p > 0, p, 1))).sum(axis=-1)
    alpha = np.minimum(p, q).sum(axis=-1)
    share = np.exp(-3 * alpha)
    return {
        "ce": cross,
        "kl": cross - entropy,
        "tv": 0.1 * cross + 0.9 * (1 - alpha),
        "lk": share * (cross - entropy) + (1 - share) * (1 - alpha),
    }[kind]


@pytest.fixture
def rows():
    """Log probabilities of drafter and target, and the true tokens' columns."""
    rng = np.random.default_rng(0)
    draft, target = (log_softmax(3 * rng.normal(size=(6, 11))) for _ in range(2))
    return draft, target, rng.integers(0, 11, 6)


@pytest.mark.parametrize("soft", [False, True], ids=["hard", "soft"])
@pytest.mark.parametrize("kind", LOSSES)
def test_costs_are_their_definitions(kind, soft, rows):
    draft, target, label = rows
    wanted = np.exp(target) if soft else np.eye(11)[label]
    arrays = (mx.array(x.astype(np.float32)) for x in (draft, target))
    draft_logs, target_logs = arrays
    cost, hard = unary_loss(kind, draft_logs, target_logs if soft else None, mx.array(label))
    close(cost, reference(kind, draft, wanted))
    close(hard, -draft[np.arange(6), label])


@pytest.mark.parametrize("kind", ["kl", "tv", "lk"])
def test_a_drafter_equal_to_its_target_costs_least(kind, rows):
    _, target, label = rows
    logs = mx.array(target.astype(np.float32))
    cost, _ = unary_loss(kind, logs, logs, mx.array(label))
    entropy = -(np.exp(target) * target).sum(axis=-1)
    close(cost, 0.1 * entropy if kind == "tv" else np.zeros(6))


@pytest.mark.parametrize("soft", [False, True], ids=["hard", "soft"])
def test_the_share_of_lk_has_no_gradient(soft, rows):
    """Its gradient is that of the mix with the share held."""
    draft, target, label = rows
    label, target = mx.array(label), mx.array(target.astype(np.float32)) if soft else None
    draft = mx.array(draft.astype(np.float32))
    variation = (
        unary_loss("tv", draft, target, label)[0] - 0.1 * unary_loss("ce", draft, target, label)[0]
    )
    share = mx.exp(-3 * (1 - variation / 0.9))

    def held(draft):
        kl, tv, ce = (unary_loss(kind, draft, target, label)[0] for kind in ("kl", "tv", "ce"))
        return (share * kl + (1 - share) * (tv - 0.1 * ce) / 0.9).sum()

    slope = mx.grad(lambda x: unary_loss("lk", x, target, label)[0].sum())(draft)
    close(slope, np.array(mx.grad(held)(draft)))


def test_selector_costs_with_hard_labels():
    """Cross entropy among the candidates; a row without its true token costs nothing."""
    scores = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    is_label = np.array([[0, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]], bool)
    cost, logprob = selector_loss(mx.array(scores), mx.array(is_label), None)
    expected = (log_softmax(scores) * is_label).sum(axis=-1)
    close(cost, -expected)
    close(logprob, expected)
    assert cost[2].item() == 0


def test_selector_costs_with_soft_labels():
    rng = np.random.default_rng(0)
    scores, wanted = rng.normal(size=(3, 4)), rng.uniform(0, 0.25, size=(3, 4))
    is_label = np.eye(4, dtype=bool)[[2, 0, 1]]
    arrays = (mx.array(x.astype(np.float32)) for x in (scores, wanted))
    scores32, wanted32 = arrays
    cost, logprob = selector_loss(scores32, mx.array(is_label), wanted32)
    close(cost, -(wanted * log_softmax(scores)).sum(axis=-1))
    close(logprob, log_softmax(scores)[is_label])


# A sampled vocabulary.

FREQUENT = np.arange(3, 63, 2)
LABELS = np.array([3, 61, 0, 4, 511, 200, 5])


def hidden_rows(count: int = len(LABELS)) -> mx.array:
    return mx.random.normal((count, HIDDEN))


@pytest.mark.parametrize("kind", [DENSE, SLIDING])
@pytest.mark.parametrize("args", [
    ARGS, CAPPED, replace(ARGS, selector_vocab_size=300)
], ids=["plain", "capped", "fewer ids"])  # fmt: skip
def test_a_sample_of_all_others_is_the_whole_vocabulary(kind, args):
    target = bind(make_model(kind))
    whole = FullVocabulary(target, args)
    hidden, final = hidden_rows(), hidden_rows()
    labels = mx.array(np.minimum(LABELS, whole.vocab_size - 1))
    sampled = SampledVocabulary(target, args, FREQUENT, whole.vocab_size - len(FREQUENT))
    whole = whole.scores(hidden, labels, final)
    # A sample stands for the ids that can be drafted, and for no others.
    total = mx.logsumexp(whole.target, axis=-1, keepdims=True)
    whole = whole._replace(target=whole.target - total)
    scores = sampled.draw(mx.random.key(1)).scores(hidden, labels, final)
    places = mx.array(FREQUENT)
    assert scores.ids.tolist() == FREQUENT.tolist()
    close(scores.unary, np.array(whole.unary[:, places]))
    for found, expected in ((scores.draft, whole.draft), (scores.target, whole.target)):
        close(found[:, : len(FREQUENT)], np.array(expected[:, places]))
        at_label = mx.take_along_axis(found, scores.label[:, None], axis=-1)
        close(at_label, np.array(mx.take_along_axis(expected, labels[:, None], axis=-1)))
        close(mx.exp(found).sum(axis=-1), np.ones(len(LABELS)))
    for kind in LOSSES:
        expected = unary_loss(kind, whole.draft, whole.target, whole.label)
        found = unary_loss(kind, scores.draft, scores.target, scores.label)
        close(mx.stack(found), np.array(mx.stack(expected)), 1e-4)


def test_soft_labels_lose_what_cannot_be_drafted():
    """What the target gives to other ids is no drafter's, and counts as never accepted."""
    target, hidden, final = bind(make_model(DENSE)), hidden_rows(), hidden_rows()[::-1]
    vocabulary = FullVocabulary(target, replace(ARGS, selector_vocab_size=300))
    scores = vocabulary.scores(hidden, mx.array(np.minimum(LABELS, 299)), final)
    wanted = mx.softmax(target.logits(final).astype(mx.float32), axis=-1)[:, :300]
    close(mx.exp(scores.target), np.array(wanted))
    cross = -(wanted * scores.draft).sum(axis=-1)
    cost, _ = unary_loss("tv", scores.draft, scores.target, scores.label)
    accepted = mx.minimum(wanted, mx.exp(scores.draft)).sum(axis=-1)
    close(cost, np.array(0.1 * cross + 0.9 * (1 - accepted)), 1e-4)


@pytest.mark.parametrize("vocab_size, negatives", [(VOCAB, 60), (46, 5), (24, 2)])
def test_the_partition_function_is_estimated_without_bias(vocab_size, negatives):
    """For rows whose label is frequent and for rows whose label is not."""
    target, draws = bind(make_model(DENSE)), 1500
    args = replace(CAPPED, selector_vocab_size=vocab_size)
    frequent = FREQUENT[FREQUENT < vocab_size]
    hidden, labels = hidden_rows(), mx.array(np.minimum(LABELS, vocab_size - 1))
    whole = FullVocabulary(target, args).scores(hidden, labels, None)
    vocabulary = SampledVocabulary(target, args, frequent, negatives)
    expected = np.exp(np.array(whole.unary[:, 3] - whole.draft[:, 3]).astype(np.float64))
    found = []
    for number in range(draws):
        scores = vocabulary.draw(mx.random.key(number)).scores(hidden, labels, None)
        found.append(scores.unary[:, 0] - scores.draft[:, 0])
    ratios = np.exp(np.array(mx.stack(found)).astype(np.float64)) / expected
    error = ratios.std(axis=0) / draws**0.5
    assert error.max() < 0.02
    assert (np.abs(ratios.mean(axis=0) - 1) < 4 * error + 1e-6).all()


def test_a_label_among_the_others_is_there_once():
    target, labels = bind(make_model(DENSE)), mx.array(LABELS)
    vocabulary, hidden, met = SampledVocabulary(target, ARGS, FREQUENT, 240), hidden_rows(), 0
    for number in range(10):
        drawn = vocabulary.draw(mx.random.key(number))
        scores = drawn.scores(hidden, labels, None)
        ids = [*FREQUENT, *drawn.sample.tolist()]
        assert len(set(ids)) == len(ids) == drawn.size - 1
        for row, label in enumerate(LABELS):
            alive = np.array(scores.draft[row]) > -1e6
            places = [place for place, id in enumerate(ids) if id == label and alive[place]]
            places += [drawn.size - 1] if alive[-1] else []
            assert places == [scores.label[row].item()]
            met += label not in FREQUENT and label in ids
    assert met > 10


def test_each_draw_is_its_own_and_a_function_of_its_key():
    vocabulary = SampledVocabulary(bind(make_model(DENSE)), ARGS, FREQUENT, 60)
    draws = [vocabulary.draw(mx.random.key(k)) for k in (1, 1, 2)]
    samples = [drawn.sample.tolist() for drawn in draws]
    assert samples[0] == samples[1] != samples[2]


@pytest.mark.parametrize("negatives", [0, -1, VOCAB - len(FREQUENT) + 1])
def test_a_sample_has_to_be_of_the_others(negatives):
    with pytest.raises(ValueError, match=r"^`negatives` is -?\d+ but has to be from 1 to 482.*$"):
        SampledVocabulary(bind(make_model(DENSE)), ARGS, FREQUENT, negatives)


def test_there_are_as_many_frequent_ids_as_candidates():
    with pytest.raises(
        ValueError, match=r"^`vocab_sample` is 7 but has to be from `selector_top_k`, 8, to 511.*$"
    ):
        SampledVocabulary(bind(make_model(DENSE)), ARGS, np.arange(7), 60)


def test_most_frequent_ids_are_those_of_the_vocabulary_lower_first():
    tokens = np.array([5, 5, 5, 9, 9, 2, 2, 7, 30, 30, 30, 30])
    assert most_frequent(tokens, 3, 16).tolist() == [2, 5, 9]
    assert most_frequent(tokens, 4, 16).tolist() == [2, 5, 7, 9]
    # Ids that never occur make up the number.
    assert most_frequent(tokens, 6, 16).tolist() == [0, 1, 2, 5, 7, 9]


@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("kind", CONFIGS)
def test_head_rows_give_the_head_s_own_products(kind, bits):
    target = bind(make_model(kind, bits=bits))
    ids, hidden = mx.array([0, 31, 7, 7]), hidden_rows()
    close(hidden @ target.head_rows(ids).T, np.array(target.unembed(hidden)[:, ids]))


@pytest.mark.parametrize("head", ["bias", "adapter"])
def test_heads_of_more_than_one_matrix_have_no_rows(head):
    model = make_model("qwen3-untied")
    model.lm_head = (
        nn.Linear(HIDDEN, VOCAB) if head == "bias" else LoRALinear.from_base(model.lm_head)
    )
    with pytest.raises(ValueError, match=r"^The target's head has a bias or an adapter.*$"):
        bind(model).head_rows(mx.array([0]))
