"""Dense weights are the numbers that the quantized ones stand for, in float32."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from support.tiny import CONFIGS, make_drafter, make_model, plain_tokens

from mlx_dflash2.checkpoint.dense import dense_size, make_dense, packed_size

KINDS = ("qwen3", "qwen3-untied", "qwen3_moe", "qwen3_5", "gpt_oss")


def quantized(model, **scheme):
    nn.quantize(model, **({"group_size": 32, "bits": 4} | scheme))
    return model


def unpacked(weight, bits: int) -> np.ndarray:
    """The small integers in a matrix of packed ones, whose bits divide 32."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    fields = (np.array(weight)[..., None] >> shifts) & (2**bits - 1)
    return fields.reshape(*weight.shape[:-1], -1)


def numbers(module) -> np.ndarray:
    """An affine module's weights: integer times scale plus bias of its group, exactly."""
    integers = unpacked(module.weight, module.bits).astype(np.float64)
    scales, biases = (
        np.repeat(np.array(part.astype(mx.float32)), module.group_size, -1).astype(np.float64)
        for part in (module.scales, module.biases)
    )
    return integers * scales + biases


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_the_dequantized_ones(kind, dtype):
    model = quantized(make_model(kind, dtype))
    expected = {p: numbers(m) for p, m in model.named_modules() if "scales" in m}
    others = {n: v for n, v in tree_flatten(model.parameters()) if n.endswith("norm.weight")}
    assert len(expected) > 8 and others
    size = dense_size(model)
    make_dense(model)
    found = dict(model.named_modules())
    for path, weight in expected.items():
        assert found[path].weight.dtype == mx.float32
        # Rounded once, to float32: not to the scales' 16 bits.
        np.testing.assert_allclose(np.array(found[path].weight), weight, rtol=0, atol=1e-7)
    parameters = dict(tree_flatten(model.parameters()))
    assert {value.dtype for value in parameters.values()} == {mx.float32}
    assert not [name for name in parameters if name.endswith((".scales", ".biases"))]
    for name, value in others.items():
        assert mx.array_equal(parameters[name], value.astype(mx.float32))
    assert size == dense_size(model) == packed_size(model)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_every_number_of_bits(bits):
    model = quantized(make_model("qwen3"), bits=bits)
    layer = model.layers[0].mlp.up_proj
    scheme = {"group_size": layer.group_size, "bits": layer.bits}
    expected = mx.dequantize(layer.weight, layer.scales, layer.biases, **scheme)
    size = dense_size(model)
    make_dense(model)
    assert mx.array_equal(model.layers[0].mlp.up_proj.weight, expected)
    assert size == packed_size(model)


@pytest.mark.parametrize("mode, group_size", [("mxfp4", 32), ("nvfp4", 16), ("mxfp8", 32)])
def test_other_modes(mode, group_size):
    bits = 8 if mode == "mxfp8" else 4
    model = quantized(make_model("qwen3_moe"), mode=mode, group_size=group_size, bits=bits)
    layer = model.layers[0].self_attn.q_proj
    expected = mx.dequantize(
        layer.weight, layer.scales, None, group_size, bits, mode, dtype=mx.float32
    )
    size = dense_size(model)
    make_dense(model)
    assert mx.array_equal(model.layers[0].self_attn.q_proj.weight, expected)
    assert size == packed_size(model)


def test_a_drafter():
    drafter = quantized(make_drafter(selector_rank=32), bits=8)
    expected = {p: numbers(m) for p, m in drafter.named_modules() if "scales" in m}
    assert {"fc", "candidate_selector.predecessor_codebook"} <= set(expected)
    make_dense(drafter)
    found = dict(drafter.named_modules())
    for path, weight in expected.items():
        np.testing.assert_allclose(np.array(found[path].weight), weight, rtol=0, atol=1e-7)


def test_tokens_are_those_of_the_quantized_model():
    """In float32 both compute the same, but for the order of sums."""
    model, prompt = quantized(make_model("qwen3_5"), bits=8), list(range(9))
    expected = plain_tokens(model, prompt, 12)
    make_dense(model)
    assert plain_tokens(model, prompt, 12) == expected


def test_lazy_weights_are_read_one_matrix_at_a_time(tmp_path):
    """Nor is there more than one dense copy of them."""
    config = CONFIGS["qwen3"] | {"hidden_size": 512, "intermediate_size": 2048}
    arch = type(make_model("qwen3"))
    model = arch(type(make_model("qwen3").args).from_dict({"model_type": "qwen3"} | config))
    file = str(tmp_path / "weights.safetensors")
    quantized(model).save_weights(file)
    size = dense_size(model)
    del model
    model = arch(type(make_model("qwen3").args).from_dict({"model_type": "qwen3"} | config))
    quantized(model).load_weights(file)
    largest = max(4 * m.weight.size * 8 for _, m in model.named_modules() if "scales" in m)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    make_dense(model)
    assert mx.get_active_memory() - before < 1.02 * size
    assert mx.get_peak_memory() - before < size + 2 * largest


def test_what_mlx_lm_cannot_dequantize_is_named():
    model = quantized(make_model("qwen3"))

    class OtherLinear(nn.Module):
        bits = 4

    other = OtherLinear()
    other.weight, other.scales = mx.zeros((4, 4), mx.uint32), mx.ones((4, 1))
    model.layers[1].mlp.up_proj = other
    with pytest.raises(
        ValueError, match=r"`model\.layers\.1\.mlp\.up_proj` is of the kind OtherLinear"
    ):
        make_dense(model)


def test_a_scale_of_the_whole_matrix_is_refused():
    model = quantized(make_model("qwen3"), mode="nvfp4", group_size=16)
    model.layers[0].mlp.up_proj.global_scale = mx.array(2.0)
    with pytest.raises(
        ValueError, match=r"`model\.layers\.0\.mlp\.up_proj` is of the kind QuantizedLinear"
    ):
        make_dense(model)
