"""A model's shadow: the same numbers from the same arrays, and the model itself untouched."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import QuantizedKVCache
from support.tiny import DENSE, HYBRID, make_drafter, make_model

from mlx_dflash2.kernels import shadow as module
from mlx_dflash2.kernels.qmm_rows import qmm_rows_ops
from mlx_dflash2.kernels.shadow import RowsEmbedding, RowsLinear, attend, shadow
from mlx_dflash2.targets import bind

KINDS = [DENSE, HYBRID, "llama-sliding", "gemma3_text", "gpt_oss", "qwen3_moe", "muse_glimmer"]


def types(model):
    return {name: type(m) for name, m in model.named_modules()}


def arrays(model):
    return {name: id(x) for name, x in tree_flatten(model.parameters())}


@pytest.mark.parametrize("kind", KINDS)
def test_the_shadow_computes_the_same(kind, monkeypatch):
    """With attention in parts of two rows wherever it is in parts at all."""
    monkeypatch.setattr(module, "FUSED_SIZES", range(8, 257))
    monkeypatch.setattr(module, "FUSED_QUERIES", 4)
    model = make_model(kind, bits=4)
    before = types(model), arrays(model)
    copied = shadow(model, lambda _: ())
    assert arrays(copied) == arrays(model)
    caches = bind(model).make_cache(), bind(copied).make_cache()
    for width in (5, 1, 7, 3):
        tokens = mx.arange(width)[None]
        one, other = (
            bind(m).logits(bind(m).forward(tokens, cache).hidden)
            for m, cache in zip((model, copied), caches, strict=True)
        )
        assert mx.array_equal(one, other).item()
    assert (types(model), arrays(model)) == before
    assert any(types(copied)[name] is not kind for name, kind in before[0].items())


def test_only_plain_quantized_products_are_replaced():
    class Sharded(nn.QuantizedLinear):
        """Stands in for those of a model that is split over machines."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.QuantizedEmbedding(64, 64)
            self.layers = [nn.QuantizedLinear(64, 64), nn.Linear(64, 64), Sharded(64, 64)]
            self.again = self.layers[0]
            self.other = nn.QuantizedLinear(64, 64, mode="mxfp4", group_size=32)

    model = Model()
    copied = shadow(model, lambda _: {2, 3})
    kinds = [type(layer) for layer in copied.layers]
    assert kinds == [RowsLinear, nn.Linear, Sharded]
    assert type(copied.embed) is RowsEmbedding and type(copied.other) is nn.QuantizedLinear
    assert copied.again is copied.layers[0] and copied.again is not model.again
    assert type(model.again) is nn.QuantizedLinear


@pytest.mark.parametrize("biased", [True, False])
def test_the_kernel_takes_the_rows_it_is_asked_for(biased, monkeypatch):
    calls, made = [], []

    def launcher(matrix, rows):
        made.append(rows)
        return lambda x: calls.append(rows) or qmm_rows_ops(x, matrix)

    monkeypatch.setattr(module, "launcher", launcher)
    linear = nn.QuantizedLinear.from_linear(nn.Linear(64, 32, bias=biased))
    copied = shadow(linear, lambda _: {3, 4})
    for shape in [(1, 3, 64), (3, 64), (2, 2, 64), (1, 5, 64), (64,)]:
        x = mx.random.normal(shape)
        assert mx.array_equal(copied(x), linear(x)).item()
    # Rows in another dtype than the scales are the stock product's.
    copied(mx.ones((3, 64), mx.bfloat16))
    assert calls == [3, 3, 4] and made == [3, 4]
    assert arrays(copied) == arrays(linear)
    embedding = nn.QuantizedEmbedding(32, 64)
    head = shadow(embedding, lambda _: {3})
    x = mx.random.normal((1, 3, 64))
    assert mx.array_equal(head.as_linear(x), embedding.as_linear(x)).item() and len(calls) == 4
    assert mx.array_equal(head(mx.arange(3)), embedding(mx.arange(3))).item()


def test_a_drafters_shadow_is_a_drafter():
    drafter = make_drafter()
    copied = shadow(drafter, lambda _: ())
    assert type(copied) is type(drafter) and copied.args is drafter.args
    assert arrays(copied) == arrays(drafter)


def heads(rows, queries=24, keys=4, size=256, past=20):
    shape = [(1, queries, rows, size), (1, keys, past + rows, size), (1, keys, past + rows, size)]
    return [mx.random.normal(s) for s in shape]


@pytest.mark.parametrize("rows", [2, 5, 6, 7, 8, 11, 16, 17])
@pytest.mark.parametrize("mask", ["causal", "array", None])
@pytest.mark.parametrize("sinks", [False, True])
def test_attention_in_parts(rows, mask, sinks):
    q, k, v = heads(rows)
    if mask == "array":
        mask = mx.random.uniform(shape=(rows, k.shape[2])) < 0.7
    extra = mx.random.normal((24,)) if sinks else None
    whole = scaled_dot_product_attention(q, k, v, None, 1 / 16, mask, extra)
    parts = attend(q, k, v, None, 1 / 16, mask, extra)
    assert mx.array_equal(whole, parts).item()


@pytest.mark.parametrize(
    "rows, queries, keys, size, expected",
    [
        (8, 24, 4, 256, 5), (5, 24, 4, 256, None), (8, 32, 4, 128, 4), (8, 32, 8, 128, None),
        (16, 32, 8, 128, None), (16, 32, 8, 256, 8), (9, 8, 8, 192, 8), (17, 24, 4, 256, None),
        (1, 64, 1, 128, None), (4, 64, 1, 128, None), (8, 24, 4, 80, None),
    ],
)  # fmt: skip
def test_how_many_rows_are_fused(rows, queries, keys, size, expected):
    assert module.rows_at_once(*heads(rows, queries, keys, size)) == expected


def test_quantized_caches_attend_as_before():
    cache = QuantizedKVCache(group_size=64, bits=8)
    q, k, v = heads(8)
    keys, values = cache.update_and_fetch(k, v)
    # mlx-lm scales the queries in place.
    whole = scaled_dot_product_attention(q + 0, keys, values, cache, 1 / 16, "causal")
    assert mx.array_equal(attend(q + 0, keys, values, cache, 1 / 16, "causal"), whole).item()
