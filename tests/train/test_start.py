"""Where training begins: a target, another drafter, or nothing."""

from dataclasses import replace
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from support.tiny import CONFIGS, DENSE, HIDDEN, HYBRID, SLIDING, VOCAB, drafter_config, make_model
from support.tiny import make_drafter as make_tiny_drafter

from mlx_dflash2.drafter.args import DrafterArgs
from mlx_dflash2.drafter.model import Drafter
from mlx_dflash2.targets import bind
from mlx_dflash2.train.blocks import run_blocks
from mlx_dflash2.train.codebooks import FactoredCodebook, factor, factor_codebooks, unfactored
from mlx_dflash2.train.shape import Shape, extended_args, new_args
from mlx_dflash2.train.start import freeze_but, from_drafter, from_target_layers, new_drafter

SHAPE = Shape(num_layers=2, block_size=6, target_layer_ids=[0, 1, 3], selector_rank=8)


def drafted(drafter, target, length: int = 20) -> tuple[mx.array, list[int]]:
    """Hidden rows of a block, and the tokens that are drafted in it."""
    mx.random.seed(7)
    tokens = mx.random.randint(0, VOCAB, (1, length))
    drafter.eval()
    context = drafter.make_context()
    taps = target.forward(tokens, target.make_cache(), drafter.target_layer_ids).taps
    drafter.extend(context, tokens[0], taps, 0)
    anchor = mx.array([5])
    hidden = drafter.run_block(target, anchor, context, drafter.block_size)[0]
    path = drafter.propose(target, anchor, context, drafter.block_size).tokens
    return hidden, path.tolist()


def first_generation() -> Drafter:
    changes = dict(conv_kernel_size=0, selector_rank=0, selector_top_k=0)
    config = drafter_config(**changes) | {"architectures": ["DFlashDraftModel"]}
    old = Drafter(DrafterArgs.from_dict(config))
    weights = [
        (name, mx.random.normal(value.shape) * value.shape[-1] ** -0.5)
        for name, value in tree_flatten(old.parameters())
        if value.ndim > 1
    ]
    old.load_weights(weights, strict=False)
    return old


@pytest.fixture(scope="module")
def target():
    return bind(make_model(DENSE))


# Beginning from another drafter.


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("chosen", [
    {}, dict(selector_rank=4, conv_kernel_size=3), dict(num_layers=4)
], ids=["parts", "other sizes", "layers"])  # fmt: skip
def test_a_drafter_with_parts_added_drafts_as_before(chosen, bits, target):
    """Identity convolutions, a selector that adds nothing, layers that give nothing."""
    old = first_generation()
    if bits:
        nn.quantize(old, group_size=32, bits=bits)
    new = from_drafter(old, extended_args(old.args, dict(chosen)), mx.random.key(0))
    assert new.args.has_conv and new.args.has_selector
    assert len(new.layers) == chosen.get("num_layers", 2)
    hidden, path = drafted(new, target)
    expected, before = drafted(old, target)
    assert path == before
    assert mx.abs(hidden - expected).max().item() < 1e-5
    names = [name for name, value in tree_flatten(new.parameters()) if value.dtype != mx.float32]
    assert names == []


@pytest.mark.parametrize("bits", [None, 4])
def test_a_second_generation_drafter_goes_on_as_it_is(bits, target):
    old = make_tiny_drafter()
    if bits:
        nn.quantize(old, group_size=32, bits=bits, class_predicate=large)
    new = from_drafter(old, extended_args(old.args, {}), mx.random.key(0))
    hidden, path = drafted(new, target)
    expected, before = drafted(old, target)
    assert path == before
    assert mx.abs(hidden - expected).max().item() < 1e-5


def large(_, module) -> bool:
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0


def test_an_added_layer_can_be_trained(target):
    """It is silent, but what keeps it silent has a gradient."""
    old = first_generation()
    new = from_drafter(old, extended_args(old.args, dict(num_layers=3)), mx.random.key(0))
    layer = new.layers[2]
    assert not layer.self_attn.o_proj.weight.any() and not layer.mlp.down_proj.weight.any()
    tokens, anchors = mx.arange(12)[None], mx.array([[5]])
    taps = target.forward(tokens, target.make_cache(), new.target_layer_ids).taps

    def loss(weights) -> mx.array:
        new.update(weights)
        return run_blocks(new, target, tokens, taps, anchors).square().sum()

    new.train()
    gradients = mx.grad(loss)(new.trainable_parameters())["layers"][2]
    assert gradients["self_attn"]["o_proj"]["weight"].any()
    assert gradients["mlp"]["down_proj"]["weight"].any()


@pytest.mark.parametrize("chosen, message", [
    (dict(num_layers=1), r"^`num_layers` is 1 but the drafter to start from has 2\.$"),
    (dict(block_size=4), r"^`block_size` is 4 but the drafter to start from has 8\.$"),
    (dict(conv_kernel_size=3), r"^`conv_kernel_size` is 3 but the drafter to start from has 2\.$"),
    (dict(selector_rank=4), r"^`selector_rank` is 4 but the drafter to start from has 32\.$"),
    (dict(causal=True), r"^`causal` is True but the drafter to start from has False\.$"),
    (dict(target_layer_ids=[0, 1]), r"^`target_layer_ids` is \[0, 1\] but .* has \[.*$"),
    (dict(rope_theta=1e5), r"^`rope_theta` is 100000\.0 but the drafter to start from has .*$"),
])  # fmt: skip
def test_what_weights_do_not_allow_is_refused(chosen, message):
    with pytest.raises(ValueError, match=message):
        extended_args(make_tiny_drafter().args, chosen)


# Beginning from the target, or from nothing.


@pytest.mark.parametrize("bits", [None, 4])
def test_the_target_s_last_layers_are_copied(bits):
    target = bind(make_model(DENSE, bits=bits))
    drafter = new_drafter(new_args(SHAPE, target, CONFIGS[DENSE]), mx.random.key(0))
    from_target_layers(drafter, target)
    x = mx.random.normal((1, 3, HIDDEN))
    for new, old in zip(drafter.layers, target.layers[-2:], strict=True):
        for name in ("q_proj", "k_proj", "v_proj"):
            close(new.self_attn[name](x), old.self_attn[name](x))
        close(new.mlp(x), old.mlp(x))
        close(new.input_layernorm(x), old.input_layernorm(x))
        close(new.post_attention_layernorm(x), old.post_attention_layernorm(x))
        assert mx.array_equal(new.self_attn.k_norm.weight, old.self_attn.k_norm.weight)
    close(drafter.norm(x), target.inner.norm(x))


def close(found: mx.array, expected: mx.array, tolerance: float = 1e-4):
    np.testing.assert_allclose(np.array(found), np.array(expected), rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind, shape, found", [
    (DENSE, replace(SHAPE, intermediate_size=32), r"\[96, 64\]"),
    (DENSE, replace(SHAPE, num_layers=5), "4"),
    (HYBRID, SHAPE, "none"),
])  # fmt: skip
def test_a_target_without_such_layers_cannot_be_begun_from(kind, shape, found):
    target = bind(make_model(kind))
    drafter = new_drafter(new_args(shape, target, CONFIGS[kind]), mx.random.key(0))
    with pytest.raises(
        ValueError, match=rf"^`init` from the target needs .* {found}; use random\.$"
    ):
        from_target_layers(drafter, target)


@pytest.mark.parametrize("kind", ["olmo2", "glm4", "gemma3_text"])
def test_norms_of_another_role_are_not_copied(kind):
    """They would have the right shapes, or none of the drafter's names."""
    target = bind(make_model(kind))
    drafter = new_drafter(new_args(SHAPE, target, CONFIGS[kind]), mx.random.key(0))
    message = rf"^`init` from the target is not possible for a {kind} model, [^\n]*; use random\.$"
    with pytest.raises(ValueError, match=message):
        from_target_layers(drafter, target)


@pytest.mark.parametrize("kind", ["llama", "seed_oss"])
def test_plain_pre_norms_are_copied(kind):
    target = bind(make_model(kind))
    drafter = new_drafter(new_args(SHAPE, target, CONFIGS[kind]), mx.random.key(0))
    assert from_target_layers(drafter, target) == []
    for new, old in zip(drafter.layers, target.layers[-2:], strict=True):
        assert mx.array_equal(new.input_layernorm.weight, old.input_layernorm.weight)


@pytest.mark.parametrize("kind, changes", [
    ("ernie4_5", {}), ("llama", dict(rope_traditional=True))
])  # fmt: skip
def test_matrices_for_other_rotations_are_not_copied(kind, changes, monkeypatch):
    """Their shapes are right; the drafter would turn the wrong channels against each other."""
    monkeypatch.setitem(CONFIGS, kind, CONFIGS[kind] | changes)
    target = bind(make_model(kind))
    drafter = new_drafter(new_args(SHAPE, target, CONFIGS[kind]), mx.random.key(0))
    with pytest.raises(ValueError, match=r"^`init` from the target .* rotates [^\n]*random\.$"):
        from_target_layers(drafter, target)


@pytest.mark.parametrize("bits", [None, 4])
def test_what_a_drafter_has_no_place_for_is_told(bits):
    target = bind(make_model("qwen2", bits=bits))
    # Of this family's own: heads share the hidden size.
    config = CONFIGS["qwen2"] | dict(head_dim=None)
    drafter = new_drafter(new_args(SHAPE, target, config), mx.random.key(0))
    biases = [f"self_attn.{name}_proj.bias" for name in "kqv"]
    assert from_target_layers(drafter, target) == biases


def test_what_a_target_does_not_say_is_asked_for(target):
    bare = SimpleNamespace(shape=target.shape, language_model=SimpleNamespace(args=NoArgs()))
    config = CONFIGS[DENSE] | dict(rope_theta=None)
    with pytest.raises(ValueError, match=r"^`rope_theta` is not in .*; give --rope-theta\.$"):
        new_args(SHAPE, bare, config)
    assert new_args(replace(SHAPE, rope_theta=5e5), bare, config).intermediate_size == 96
    with pytest.raises(ValueError, match=r"^`intermediate_size` is not .*; give --intermediate"):
        new_args(SHAPE, bare, config | dict(intermediate_size=None))


class NoArgs:
    """A model's args that say nothing."""


def test_a_drafter_s_generation_is_that_of_its_parts():
    old = first_generation().args
    none = dict(conv_kernel_size=0, selector_rank=0)
    assert extended_args(old, none).generation == 1
    assert extended_args(old, none | dict(selector_rank=4)).generation == 2


def test_a_new_drafter_s_added_parts_change_nothing(target):
    args = new_args(SHAPE, target, CONFIGS[DENSE])
    drafter, plain = new_drafter(args, mx.random.key(0)), Drafter(replace(args, conv_kernel_size=0))
    plain.load_weights(tree_flatten(drafter.parameters()), strict=False)
    hidden, path = drafted(drafter, target)
    expected, _ = drafted(plain, target)
    assert mx.array_equal(hidden, expected)
    assert path == mx.argmax(target.head(hidden), axis=-1)[0].tolist()
    stds = [
        v.std().item() for n, v in tree_flatten(drafter.parameters()) if n.endswith("proj.weight")
    ]
    np.testing.assert_allclose(stds, 0.02, rtol=0.1)


def test_new_drafters_are_a_function_of_their_key(target):
    args = new_args(SHAPE, target, CONFIGS[DENSE])
    one, same, other = (new_drafter(args, mx.random.key(k)).fc.weight for k in (0, 0, 1))
    assert mx.array_equal(one, same) and not mx.array_equal(one, other)


def test_new_args_are_the_target_s_and_what_was_chosen():
    target = bind(make_model(SLIDING))
    config = CONFIGS[SLIDING] | dict(output_multiplier=0.25, final_logit_softcapping=15.0)
    args = new_args(replace(SHAPE, sliding_window=9, causal=True), target, config)
    assert (args.hidden_size, args.vocab_size, args.num_target_layers) == (HIDDEN, VOCAB, 4)
    assert (args.head_dim, args.num_key_value_heads, args.intermediate_size) == (32, 2, 96)
    assert (args.output_multiplier, args.final_logit_softcapping) == (0.25, 15.0)
    assert (args.block_size, args.selector_rank, args.selector_top_k) == (6, 8, 16)
    assert args.layer_types == ["sliding_attention"] * 2 and args.sliding_window == 9
    assert args.causal == [True, True] and args.mask_token_id == VOCAB - 1
    assert args.generation == 2 and args.target_layer_ids == [0, 1, 3]


def test_new_args_read_the_text_part_of_a_config():
    target = bind(make_model(HYBRID))
    args = new_args(Shape(num_layers=1), target, CONFIGS[HYBRID])
    assert (args.head_dim, args.intermediate_size, args.target_layer_ids) == (32, 96, [2])


@pytest.mark.parametrize("parts, generation", [
    (dict(selector_rank=0, conv_kernel_size=0), 1),
    (dict(selector_rank=0), 2),
    (dict(conv_kernel_size=0), 2),
], ids=["neither", "no selector", "no conv"])  # fmt: skip
def test_parts_may_be_left_out(parts, generation, target):
    args = new_args(replace(SHAPE, **parts), target, CONFIGS[DENSE])
    assert args.generation == generation
    assert args.has_conv == ("conv_kernel_size" not in parts)
    assert args.has_selector == ("selector_rank" not in parts)


@pytest.mark.parametrize("only, message", [
    (["head"], r"^`only` has to name some of backbone, conv, selector but is \['head'\]\.$"),
    ([], r"^`only` has to name some of .*$"),
    (["selector"], r"^The drafter has no selector to train\.$"),
])  # fmt: skip
def test_parts_to_be_trained_have_to_be_there(only, message, target):
    args = new_args(replace(SHAPE, selector_rank=0), target, CONFIGS[DENSE])
    with pytest.raises(ValueError, match=message):
        freeze_but(new_drafter(args, mx.random.key(0)), only)


@pytest.mark.parametrize("changes, field", [
    (dict(target_layer_ids=[2, 1]), "target_layer_ids"),
    (dict(target_layer_ids=[0, 4]), "target_layer_ids"),
    (dict(block_size=0), "block_size"),
    (dict(conv_group_size=7), "conv_group_size"),
    (dict(selector_top_k=VOCAB + 1), "selector_top_k"),
    (dict(sliding_window=1), "sliding_window"),
])  # fmt: skip
def test_impossible_shapes_are_refused_by_name(changes, field, target):
    with pytest.raises(ValueError, match=rf"^Drafter config: `(dflash_config\.)?{field}`[^\n]*$"):
        new_args(replace(SHAPE, **changes), target, CONFIGS[DENSE])


# Factored codebooks.


def test_an_exactly_factored_table_is_recovered(target):
    weight = mx.random.normal((8, HIDDEN))
    table = target.embed(mx.arange(VOCAB)) @ weight.T
    found = factor(target.embed, table)
    close(found.weight, weight, 1e-3)
    close(found.table(VOCAB), table, 1e-3)


def test_the_factored_table_nearest_to_a_random_one_is_found(target):
    """No small change of the matrix comes nearer."""
    table = mx.random.normal((VOCAB, 4))
    found = factor(target.embed, table)
    rows = np.array(target.embed(mx.arange(VOCAB)), np.float64)
    expected = np.linalg.lstsq(rows, np.array(table, np.float64), rcond=None)[0].T
    np.testing.assert_allclose(np.array(found.weight), expected, atol=1e-3)


@pytest.mark.parametrize("known", [True, False])
def test_an_unfactored_drafter_is_an_ordinary_one(known, target):
    """It drafts as the tables that were factored say, or with nothing known as without any."""
    drafter, ids = make_tiny_drafter(), mx.arange(VOCAB)
    selector = drafter.candidate_selector
    books = "predecessor_codebook", "successor_codebook"
    for book in books:
        selector[book].weight = target.embed(ids) @ mx.random.normal((32, HIDDEN)).T
    names = sorted(name for name, _ in tree_flatten(drafter.trainable_parameters()))
    hidden, expected = drafted(drafter, target)
    best = mx.argmax(target.head(hidden), axis=-1)[0].tolist()
    assert expected != best
    kept = factor_codebooks(selector, target.embed, known)
    assert all(isinstance(selector[book], FactoredCodebook) for book in books)
    assert kept.item() == pytest.approx(1.0, abs=1e-3)
    assert sorted(name for name, _ in tree_flatten(drafter.trainable_parameters())) == names
    rows = [selector[book](ids) for book in books]
    unfactored(selector, VOCAB)
    for book, row in zip(books, rows, strict=True):
        assert type(selector[book]) is nn.Embedding
        close(selector[book](ids), row, 1e-5)
    assert drafted(drafter, target)[1] == (expected if known else best)
