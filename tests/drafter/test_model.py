"""The drafter's parts, by hand-computed vectors and by what must not matter."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from support.golden import CASES, GOLDEN, HeadTarget, rounds
from support.tiny import DENSE, HIDDEN, VOCAB, drafter_config, make_drafter, make_model

from mlx_dflash2.checkpoint.load import load_drafter
from mlx_dflash2.drafter.args import DrafterArgs, default_target_layer_ids
from mlx_dflash2.drafter.conv import GroupedDynamicConv
from mlx_dflash2.targets import bind

ARGS = DrafterArgs.from_dict(drafter_config())


def small_conv(**weights):
    conv = GroupedDynamicConv(ARGS)
    conv.kernel_projection.weight = mx.zeros_like(conv.kernel_projection.weight)
    for name, value in weights.items():
        setattr(conv, name, value)
    return conv


def finish(conv, x, kernel):
    """The convolution alone, added to nothing."""
    return conv.finish(x, kernel, mx.zeros_like(x), nn.RMSNorm(HIDDEN))[0]


def test_conv_starts_as_the_identity():
    conv, x = small_conv(), mx.random.normal((2, 8, HIDDEN))
    prepared, kernel = conv.prepare(x)
    assert mx.array_equal(prepared, x).item()
    assert mx.array_equal(finish(conv, x, kernel), x).item()


def test_conv_projection_rows_are_side_tap_group():
    """The row at side 1, tap 1, group 0 reaches only ``finish``, and only its delayed term."""
    conv, x = small_conv(), mx.random.normal((1, 8, HIDDEN))
    groups, taps = conv.num_groups, 2
    weight = mx.zeros_like(conv.kernel_projection.weight)
    weight[1 * taps * groups + 1 * groups + 0] = mx.eye(HIDDEN)[0]
    conv.kernel_projection.weight = weight
    prepared, kernel = conv.prepare(x)
    assert mx.array_equal(prepared, x).item()
    y = mx.random.normal(x.shape)
    expected = np.array(y)
    expected[0, 1:, :16] += np.array(x)[0, 1:, :1] * np.array(y)[0, :-1, :16]
    np.testing.assert_allclose(np.array(finish(conv, y, kernel)), expected, atol=1e-6)


def test_the_finish_kernel_comes_from_the_normed_input():
    """Not from the convolved input and not from the output that it convolves."""
    base = mx.zeros((2, 2, HIDDEN))
    base[0] = mx.random.normal((2, HIDDEN))
    conv, x = small_conv(base_kernel=base), mx.random.normal((1, 8, HIDDEN))
    weight = mx.zeros_like(conv.kernel_projection.weight)
    groups = conv.num_groups
    weight[2 * groups : 3 * groups] = mx.random.normal((groups, HIDDEN))
    conv.kernel_projection.weight = weight
    prepared, kernel = conv.prepare(x)
    assert mx.array_equal(finish(conv, mx.zeros_like(x), kernel), mx.zeros_like(x)).item()
    dynamic = mx.repeat(x @ weight[2 * groups : 3 * groups].T, HIDDEN // groups, axis=-1)
    assert mx.allclose(finish(conv, prepared, kernel), dynamic * prepared, atol=1e-4).item()


@pytest.mark.parametrize(
    "layers, depth, ids",
    [(5, 36, [1, 9, 17, 25, 33]), (5, 64, [1, 16, 31, 46, 61]), (5, 52, [1, 13, 25, 37, 49])],
)
def test_default_taps(layers, depth, ids):
    assert default_target_layer_ids(layers, depth) == ids
    assert default_target_layer_ids(1, depth) == [depth // 2]


@pytest.mark.parametrize("limit", ["target", "drafter", "selector_vocab_size"])
def test_ids_beyond_the_vocabulary_are_never_drafted(limit):
    """Padding rows that would win by far are not candidates."""
    target, drafter = HeadTarget("dflash2_sliding_block8"), load_drafter(GOLDEN / CASES[-1])
    target.head_weight = mx.concatenate([target.head_weight, 100 * mx.ones((64, HIDDEN))])
    target.vocab_size = {"target": 400}.get(limit, 576)
    if limit == "selector_vocab_size":
        drafter.args.selector_vocab_size = 300
    allowed = {"target": 400, "drafter": 512, "selector_vocab_size": 300}[limit]
    golden = next(rounds("dflash2_sliding_block8"))
    context = drafter.make_context()
    taps = mx.array(golden["taps"])
    drafter.extend(context, mx.zeros(taps.shape[1]), taps, 0)
    proposal = drafter.propose(target, mx.array([1]), context, 8)
    assert mx.max(proposal.tokens).item() < allowed


def test_an_anchor_without_a_row_in_the_codebooks():
    """The target has padding rows that the drafter has not, and may emit one of them."""
    target, drafter = HeadTarget(CASES[-1]), load_drafter(GOLDEN / CASES[-1])
    target.embedding = mx.concatenate([target.embedding, mx.ones((64, HIDDEN))])
    target.vocab_size = 576
    context = drafter.make_context()
    drafter.extend(context, mx.zeros(4), mx.random.normal((1, 4, 3 * HIDDEN)), 0)
    past = drafter.propose(target, mx.array([570]), context, 8)
    target.embedding[511] = target.embedding[570]
    last = drafter.propose(target, mx.array([511]), context, 8)
    assert mx.array_equal(past.tokens, last.tokens).item() and past.finite.item()


def test_quantised_codebooks_score_as_their_unpacked_rows():
    drafter = make_drafter(selector_rank=64)
    selector = drafter.candidate_selector
    anchor, hidden = mx.array([3, 9]), mx.random.normal((2, 7, HIDDEN))
    logits = mx.random.normal((2, 7, VOCAB))
    for name in ("predecessor_codebook", "successor_codebook"):
        quantised = nn.QuantizedEmbedding.from_embedding(selector[name], group_size=64, bits=8)
        selector[name] = quantised
    packed = selector(anchor, hidden, logits)
    for name in ("predecessor_codebook", "successor_codebook"):
        table = nn.Embedding(VOCAB, 64)
        table.weight = selector[name](mx.arange(VOCAB))
        selector[name] = table
    plain = selector(anchor, hidden, logits)
    assert mx.array_equal(packed.tokens, plain.tokens).item()
    assert mx.array_equal(packed.candidates, plain.candidates).item()


@pytest.mark.parametrize("target_dtype", [mx.float16, mx.bfloat16, mx.float32], ids=str)
@pytest.mark.parametrize("drafter_dtype", [mx.bfloat16, mx.float32], ids=str)
def test_dtypes_at_the_boundaries(target_dtype, drafter_dtype):
    """The drafter computes in its own dtype with a float32 residual; the head in the target's."""
    target, drafter = bind(make_model(DENSE, dtype=target_dtype)), make_drafter()
    drafter.set_dtype(drafter_dtype)
    taps = target.forward(mx.arange(20)[None], target.make_cache(), (1, 3)).taps
    assert taps.dtype == target_dtype
    context = drafter.make_context()
    drafter.extend(context, mx.arange(20), taps, 0)
    assert all(array.dtype == drafter_dtype for array in context.state)
    hidden = drafter(target.embed(mx.array([[1] + [VOCAB - 1] * 7])), context)
    assert hidden.dtype == drafter_dtype
    assert target.head(hidden).dtype == target_dtype


def test_a_residual_past_the_range_of_16_bits_stays_finite():
    drafter, target = make_drafter(), HeadTarget(CASES[-1])
    drafter.set_dtype(mx.bfloat16)
    weight = drafter.layers[0].mlp.down_proj.weight
    weight[5] = 1e5
    context = drafter.make_context()
    drafter.extend(context, mx.arange(4), mx.random.normal((1, 4, 2 * HIDDEN)), 0)
    embedded = target.embed(mx.array([[1] + [VOCAB - 1] * 7]))
    x, layer = embedded.astype(mx.float32), drafter.layers[0]
    h = layer.input_layernorm(x).astype(mx.bfloat16)
    residual, _ = layer(x, h, context, drafter.norm)
    assert mx.max(mx.abs(residual)).item() > 7e4
    assert mx.all(mx.isfinite(drafter(embedded, context))).item()


def test_the_batch_of_blocks_equals_the_blocks_alone():
    drafter = make_drafter()
    taps, embedded = mx.random.normal((2, 9, 2 * HIDDEN)), mx.random.normal((2, 8, HIDDEN))

    def run(rows):
        context = drafter.make_context()
        drafter.extend(context, mx.arange(9), taps[rows], 0)
        return drafter(embedded[rows], context)

    both = run(slice(0, 2))
    for row in range(2):
        alone = run(slice(row, row + 1))
        assert mx.allclose(both[row : row + 1], alone, atol=1e-5).item()
