"""Targets compute bit for bit what their models do, and tap the right layers."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.lora import LoRAEmbedding, LoRALinear
from support.tiny import CONFIGS, DENSE, VOCAB, cache_arrays, make_model

from mlx_dflash2.decode.rollback import Transaction
from mlx_dflash2.targets import bind, supported_targets

FORMATS = {
    "f32": dict(dtype=mx.float32),
    "bf16": dict(dtype=mx.bfloat16),
    "4bit": dict(dtype=mx.float32, bits=4),
}


MIXTURES = ("qwen3_moe", "qwen2_moe", "qwen3_5_moe", "qwen3_next", "mixtral", "gpt_oss")


def assert_same_caches(one, other):
    one, other = cache_arrays(one), cache_arrays(other)
    assert len(one) == len(other)
    assert all(mx.array_equal(a, b).item() for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("form", FORMATS)
def test_forward_is_the_models_own(kind, form):
    """Prefill, a block, one row, and a block beyond any window: logits and caches are equal."""
    if form == "bf16" and not mx.metal.is_available() and kind in MIXTURES:
        pytest.skip("MLX's CPU backend gathers experts in float32 only")
    model = make_model(kind, **FORMATS[form])
    target = bind(model)
    layers = list(range(0, len(target.layers), 2))
    ours, theirs = target.make_cache(), make_prompt_cache(model)
    for step, length in enumerate((13, 5, 1, 9)):
        tokens = mx.random.randint(0, 32, (1, length))
        taps = layers if step % 2 else ()
        transaction = Transaction(ours, length)
        out = target.forward(tokens, ours, tap_layers=taps, record=bool(step % 2))
        transaction.commit([length], out.records)
        assert mx.array_equal(target.logits(out.hidden), model(tokens, cache=theirs)).item()
        assert_same_caches(ours, theirs)
        if taps:
            assert out.taps.shape[-1] == len(layers) * target.shape.hidden_size


def test_every_supported_target_is_tested():
    assert {kind.split("-")[0] for kind in CONFIGS} - {"qwen3_5_moe", "gemma4"} == set(
        supported_targets()
    )


class AddUnit(nn.Module):
    """A layer that adds one to one channel."""

    def __init__(self, index):
        super().__init__()
        self.index = index

    def __call__(self, h, mask=None, cache=None):
        return h + mx.eye(h.shape[-1])[self.index]


def test_a_tap_is_the_output_of_its_layer():
    """Layers that add a unit each: a tap shows exactly the layers up to its own."""
    model = make_model(DENSE)
    model.model.layers = [AddUnit(i) for i in range(len(model.layers))]
    target = bind(model)
    tokens = mx.array([[3, 4]])
    out = target.forward(tokens, target.make_cache(), tap_layers=(0, 2))
    added = out.taps.reshape(1, 2, 2, -1) - target.embed(tokens)[:, :, None]
    assert mx.allclose(added[0, :, 0].sum(-1), mx.array(1.0), atol=1e-5).item()
    assert mx.allclose(added[0, :, 1, :3], mx.array(1.0), atol=1e-5).item()


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kind", ["qwen3", "qwen3-untied"])
def test_head_is_the_targets_own(kind, form):
    model = make_model(kind, **FORMATS[form])
    target = bind(model)
    cache, tokens = target.make_cache(), mx.array([[1, 2, 3]])
    hidden = target.forward(tokens, cache).hidden
    assert target.vocab_size == VOCAB
    assert mx.array_equal(target.head(hidden), model(tokens)).item()
    # A drafter's rows may be wider than the head: they are narrowed, not the head widened.
    assert target.head(hidden.astype(mx.float32)).dtype == model(tokens).dtype


def test_scaled_and_capped_logits_belong_to_the_target_alone():
    model = make_model("muse_glimmer")
    target, tokens = bind(model), mx.array([[1, 2, 3]])
    hidden = target.forward(tokens, target.make_cache()).hidden
    raw, args = target.head(hidden), model.args
    cap = args.final_logit_softcapping
    expected = mx.tanh(raw * args.output_multiplier / cap) * cap
    assert mx.array_equal(expected, model(tokens)).item()
    # The model norms its input rows; the drafter was trained on the bare ones.
    assert mx.array_equal(target.embed(tokens), model.model.embed_tokens(tokens)).item()
    assert not mx.allclose(target.embed_inputs(tokens), target.embed(tokens)).item()


def test_gemma_drafters_get_scaled_embeddings():
    model = make_model("gemma4")
    tokens = mx.array([[1, 2, 3]])
    rows = model.language_model.model.embed_tokens(tokens)
    assert mx.array_equal(bind(model).embed(tokens), rows * HIDDEN_SCALE).item()


HIDDEN_SCALE = 64**0.5


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-untied"])
def test_adapters_on_embedding_and_head(kind):
    """LoRA layers stand in the place of the layers that they adapt."""
    model = make_model(kind)
    name = "embed_tokens" if kind == "qwen3" else "lm_head"
    owner = model.model if kind == "qwen3" else model
    wrap = LoRAEmbedding if kind == "qwen3" else LoRALinear
    owner[name] = wrap.from_base(owner[name], r=4)
    owner[name].lora_b = mx.random.normal(owner[name].lora_b.shape)
    target, tokens = bind(model), mx.array([[1, 2, 3]])
    out = target.forward(tokens, target.make_cache())
    assert target.vocab_size == VOCAB
    assert mx.array_equal(target.logits(out.hidden), model(tokens)).item()
    assert mx.array_equal(target.head(out.hidden), model(tokens)).item()


def test_unknown_models_are_refused_by_name():
    class Model(nn.Module):
        model_type = "strange"

    with pytest.raises(ValueError, match=r"'strange'.*supported are.*qwen3_5"):
        bind(Model())
