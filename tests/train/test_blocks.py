"""A training pass computes what decoding computes, and its gradient is the loss's slope."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from support.tiny import DENSE, HYBRID, SLIDING, VOCAB, drafter_config, make_model

from mlx_dflash2.drafter.args import DrafterArgs
from mlx_dflash2.drafter.model import Drafter
from mlx_dflash2.targets import bind
from mlx_dflash2.train.blocks import run_blocks
from mlx_dflash2.train.codebooks import factor_codebooks
from mlx_dflash2.train.objective import Batch, Objective
from mlx_dflash2.train.vocabulary import FullVocabulary, SampledVocabulary

FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"
SHORT = dict(sliding_window=5)
DRAFTERS = {
    "all seen": dict(layer_types=[FULL_ATTENTION] * 2, sliding_window=None),
    "all seen, causal": dict(
        layer_types=[FULL_ATTENTION] * 2, sliding_window=None, causal=[True] * 2
    ),
    "short window": SHORT,
    "short window, causal": SHORT | dict(causal=[True] * 2),
    "mixed layers": SHORT | dict(layer_types=[SLIDING_ATTENTION, FULL_ATTENTION]),
    "mixed causality": SHORT
    | dict(layer_types=[FULL_ATTENTION, SLIDING_ATTENTION], causal=[False, True]),
    "long kernel": SHORT | dict(conv_kernel_size=3),
    "no conv": SHORT | dict(conv_kernel_size=0, selector_rank=0),
    "scaled input": dict(input_embedding_scale=0.5),
}
TARGETS = [(DENSE, None), (DENSE, 4), (HYBRID, None), (SLIDING, None), (SLIDING, 4)]
LENGTHS = (23, 9, 17)
LAYERS = [1, 3]


def drafter_with(**changes) -> Drafter:
    args = replace(DrafterArgs.from_dict(drafter_config()), **changes)
    drafter = Drafter(args)
    weights = [
        (name, value + (0.3 if value.ndim == 3 else value.shape[-1] ** -0.5) * noise)
        for name, value in tree_flatten(drafter.parameters())
        for noise in [mx.random.normal(value.shape)]
    ]
    drafter.load_weights(weights)
    return drafter


def padded(lengths=LENGTHS, vocab_size=VOCAB) -> mx.array:
    """Random texts [N, S]; behind each of them 0."""
    tokens = mx.random.randint(1, vocab_size, (len(lengths), max(lengths)))
    inside = mx.arange(max(lengths)) < mx.array(lengths)[:, None]
    return mx.where(inside, tokens, 0).astype(mx.uint32)


def taps_of(target, tokens: mx.array) -> mx.array:
    return target.forward(tokens, target.make_cache(), LAYERS).taps


def decoded(drafter, target, tokens: mx.array, anchor: int, size: int | None) -> mx.array:
    """Rows of the block after an anchor of one text, as decoding comes to them."""
    drafter.eval()
    context = drafter.make_context()
    if anchor:
        drafter.extend(context, tokens[:anchor], taps_of(target, tokens[None])[:, :anchor], 0)
    size = size or drafter.block_size
    return drafter.run_block(target, tokens[anchor : anchor + 1], context, size)[0]


def assert_as_decoded(drafter, target, size: int | None = None):
    tokens = padded()
    # Each text's first and last position, and some between.
    anchors = mx.array([[0, 1, 4, 11, 22], [0, 2, 5, 7, 8], [3, 0, 16, 6, 15]])
    drafter.train()
    hidden = run_blocks(drafter, target, tokens, taps_of(target, tokens), anchors, size)
    for row, (length, positions) in enumerate(zip(LENGTHS, anchors.tolist(), strict=True)):
        for column, anchor in enumerate(positions):
            expected = decoded(drafter, target, tokens[row, :length], anchor, size)[0]
            off = mx.abs(hidden[row, column] - expected).max().item()
            assert off < 3e-5, (row, anchor, off)


@pytest.mark.parametrize("changes", DRAFTERS.values(), ids=DRAFTERS)
def test_every_block_is_as_decoded(changes):
    assert_as_decoded(drafter_with(**changes), bind(make_model(DENSE)))


@pytest.mark.parametrize("size", (2, 3))
def test_shorter_blocks_are_as_decoded(size):
    assert_as_decoded(drafter_with(**SHORT), bind(make_model(DENSE)), size)


@pytest.mark.parametrize("kind, bits", TARGETS)
def test_every_block_is_as_decoded_behind(kind, bits):
    assert_as_decoded(drafter_with(**SHORT), bind(make_model(kind, bits=bits)))


@pytest.fixture(scope="module")
def one_text():
    """A target, one text of it with its taps, and three anchors."""
    mx.random.seed(1)
    target = bind(make_model(DENSE))
    tokens = padded((40,))
    return target, tokens, taps_of(target, tokens), mx.array([[7, 15, 30]])


@pytest.mark.parametrize("changes", DRAFTERS.values(), ids=DRAFTERS)
def test_nothing_from_the_anchor_on_leaks_in(changes, one_text):
    """Neither taps from the anchor on, nor tokens after it, change one bit of a block."""
    target, tokens, taps, anchors = one_text
    drafter = drafter_with(**changes).train()
    before = run_blocks(drafter, target, tokens, taps, anchors)
    late = mx.arange(40)[None] >= 15
    taps = mx.where(late[..., None], taps + 3, taps)
    tokens = mx.where(mx.arange(40)[None] > 15, (tokens + 7) % VOCAB, tokens)
    after = run_blocks(drafter, target, tokens, taps, anchors)
    same = [mx.array_equal(a, b).item() for a, b in zip(before[0], after[0], strict=True)]
    assert same == [True, True, False]


@pytest.mark.parametrize("changes", DRAFTERS.values(), ids=DRAFTERS)
def test_the_row_before_the_anchor_is_seen(changes, one_text):
    target, tokens, taps, anchors = one_text
    drafter = drafter_with(**changes).train()
    before = run_blocks(drafter, target, tokens, taps, anchors)
    taps = mx.where((mx.arange(40) == 14)[None, :, None], taps + 3, taps)
    after = run_blocks(drafter, target, tokens, taps, anchors)
    same = [mx.array_equal(a, b).item() for a, b in zip(before[0], after[0], strict=True)]
    assert same[:2] == [True, False]


@pytest.mark.parametrize("changes", DRAFTERS.values(), ids=DRAFTERS)
def test_blocks_do_not_see_each_other(changes, one_text):
    """Another token at one anchor changes that block alone: no attention, no convolution."""
    target, tokens, taps, _ = one_text
    # The second begins within the first, the third behind it.
    anchors = mx.array([[12, 15, 20]])
    drafter = drafter_with(**changes).train()
    before = run_blocks(drafter, target, tokens, taps, anchors)
    tokens = mx.where(mx.arange(40)[None] == 15, (tokens + 7) % VOCAB, tokens)
    after = run_blocks(drafter, target, tokens, taps, anchors)
    same = [mx.array_equal(a, b).item() for a, b in zip(before[0], after[0], strict=True)]
    assert same == [True, False, True]


def test_padding_behind_a_text_changes_nothing(one_text):
    target, tokens, taps, anchors = one_text
    drafter = drafter_with(**SHORT, layer_types=[SLIDING_ATTENTION, FULL_ATTENTION]).train()
    short = run_blocks(drafter, target, tokens[:, :31], taps[:, :31], anchors)
    filled = run_blocks(drafter, target, tokens, taps, anchors)
    assert mx.allclose(short, filled, rtol=0, atol=1e-5).item()


# Gradients.

SMALL = "qwen3-vocab32"


def small_batch(target, soft: bool) -> Batch:
    lengths = (20, 13)
    tokens = padded(lengths, 31)
    shown = target.forward(tokens, target.make_cache(), LAYERS)
    anchors = mx.array([[2, 5, 9, 14, 18], [1, 4, 11, 0, 0]])
    used = mx.array([[True] * 5, [True] * 3 + [False] * 2])
    final = shown.hidden if soft else None
    return Batch(tokens, shown.taps, final, mx.array(lengths), anchors, used)


def small_drafter(**changes) -> Drafter:
    """With every id among the candidates: the loss then has no steps for a slope to miss."""
    sizes = dict(vocab_size=32, selector_top_k=32, mask_token_id=31)
    return drafter_with(**sizes, **SHORT, **changes).train()


def loss_and_gradients(objective, drafter, target, vocabulary, batch):
    def loss_of(weights):
        drafter.update(weights)
        return objective(drafter, target, vocabulary, batch)[0]

    weights = tree_map(mx.array, drafter.trainable_parameters())
    loss, gradients = mx.value_and_grad(loss_of)(weights)
    mx.eval(loss, gradients)
    drafter.update(weights)
    return loss.item(), dict(tree_flatten(gradients)), loss_of


def slope(loss_of, weights: dict, name: str, direction: mx.array, eps: float) -> float:
    def at(step: float) -> float:
        moved = weights | {name: weights[name] + step * direction}
        return loss_of(tree_unflatten(list(moved.items()))).item()

    return (at(eps) - at(-eps)) / (2 * eps)


def directions(gradient: mx.array) -> list[mx.array]:
    """The two coordinates that matter most, and a slanted direction across all of them."""
    largest = np.argsort(-np.abs(np.array(gradient)).ravel())[:2].tolist()
    single = [(mx.arange(gradient.size) == i).reshape(gradient.shape) for i in largest]
    noise = mx.random.normal(gradient.shape)
    slanted = gradient / mx.linalg.norm(gradient) + noise / mx.linalg.norm(noise)
    return [*single, slanted]


@pytest.mark.parametrize("objective, soft, factored", [
    (Objective("ce"), False, False),
    (Objective("kl", gamma=2.0, selector_weight=0.5), True, True),
], ids=["hard", "soft, factored"])  # fmt: skip
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
def test_gradients_are_slopes(objective, soft, factored, causal):
    target = bind(make_model(SMALL))
    drafter, batch = small_drafter(causal=[causal] * 2), small_batch(target, soft)
    if factored:
        factor_codebooks(drafter.candidate_selector, target.embed, True)
    vocabulary = FullVocabulary(target, drafter.args)
    _, gradients, loss_of = loss_and_gradients(objective, drafter, target, vocabulary, batch)
    weights = dict(tree_flatten(tree_map(mx.array, drafter.trainable_parameters())))
    for name in (
        "layers.0.attention_conv.base_kernel",
        "layers.1.mlp_conv.base_kernel",
        "layers.0.mlp_conv.kernel_projection.weight",
        "layers.1.attention_conv.kernel_projection.weight",
        "candidate_selector.predecessor_codebook.weight",
        "candidate_selector.successor_codebook.weight",
        "candidate_selector.hidden_projection.weight",
        "layers.0.self_attn.q_proj.weight",
        "layers.1.self_attn.k_proj.weight",
        "layers.1.self_attn.v_proj.weight",
        "layers.0.mlp.down_proj.weight",
        "norm.weight",
        "fc.weight",
    ):
        for direction in directions(gradients[name]):
            expected = (gradients[name] * direction).sum().item()
            found = slope(loss_of, weights, name, direction, 1e-2)
            assert found == pytest.approx(expected, rel=0.03, abs=2e-4), name


def same_gradients(one: dict, other: dict):
    assert one.keys() == other.keys()
    for name, value in one.items():
        scale = mx.abs(value).max().item()
        assert mx.abs(value - other[name]).max().item() <= 1e-5 * max(scale, 1e-2), name


@pytest.mark.parametrize("soft", [False, True], ids=["hard", "soft"])
@pytest.mark.parametrize("sampled", [False, True], ids=["full", "sampled"])
@pytest.mark.parametrize("gamma", [4.0, None], ids=["gamma", "d-pace"])
@pytest.mark.parametrize("parts", [{}, dict(selector_rank=0), dict(conv_kernel_size=0)], ids=str)
def test_memory_savers_change_neither_loss_nor_gradients(soft, sampled, gamma, parts, monkeypatch):
    """Checkpointing each text, taking rows in turns, and both at once."""
    target, drafter = bind(make_model(DENSE)), drafter_with(**SHORT, **parts).train()
    batch, vocabulary = small_batch(target, soft), FullVocabulary(target, drafter.args)
    if sampled:
        vocabulary = SampledVocabulary(target, drafter.args, np.arange(40), 50)
        vocabulary = vocabulary.draw(mx.random.key(1))

    def run(**changes):
        objective = Objective("lk" if soft else "ce", gamma, **changes)
        return loss_and_gradients(objective, drafter, target, vocabulary, batch)

    loss, gradients, _ = run()
    for checkpoint, limit in ((True, 2**25), (False, 5 * vocabulary.size), (True, 3000)):
        monkeypatch.setattr("mlx_dflash2.train.objective.MAX_LOGITS", limit)
        found, others, _ = run(checkpoint=checkpoint)
        assert found == pytest.approx(loss, rel=1e-6)
        same_gradients(gradients, others)


def test_rows_that_do_not_count_have_no_gradient():
    """Neither rows behind a text's end nor anchors that only fill up."""
    target = bind(make_model(SMALL))
    drafter, batch = small_drafter(), small_batch(target, False)
    vocabulary = FullVocabulary(target, drafter.args)
    loss, gradients, _ = loss_and_gradients(Objective(), drafter, target, vocabulary, batch)
    tokens = mx.where(mx.arange(20) < batch.lengths[:, None], batch.tokens, 5).astype(mx.uint32)
    other = batch._replace(tokens=tokens, anchors=mx.where(batch.used, batch.anchors, 6))
    found, others, _ = loss_and_gradients(Objective(), drafter, target, vocabulary, other)
    assert found == loss
    same_gradients(gradients, others)


def test_a_token_without_a_row_in_the_codebooks_is_its_last(one_text):
    """As in decoding: padding ids of the target can be in a text, yet no drafter knows them."""
    target, *_ = one_text
    drafter = drafter_with(vocab_size=500, mask_token_id=499, selector_top_k=500).train()
    vocabulary = FullVocabulary(target, drafter.args)
    tokens = mx.arange(480, 512)[None].astype(mx.uint32) * 7 % 512
    tokens = mx.where(mx.arange(32) == 10, 511, tokens).astype(mx.uint32)
    anchors, taps = mx.array([[10]]), taps_of(target, tokens)
    batch = Batch(tokens, taps, None, mx.array([12]), anchors, mx.array([[True]]))
    loss, gradients, _ = loss_and_gradients(Objective(), drafter, target, vocabulary, batch)
    row = gradients["candidate_selector.predecessor_codebook.weight"]
    assert np.isfinite(loss)
    assert mx.any(row != 0, axis=-1).tolist() == [False] * 499 + [True]
