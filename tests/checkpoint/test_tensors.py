"""Quantized drafters: at load and as stored."""

import json

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from support.drafters import SPECULATORS, V2, block_of, nested
from support.folders import refused
from support.golden import CASES, GOLDEN, HeadTarget, rounds
from support.saved_models import save_drafter, write_config

from mlx_dflash2.checkpoint.load import load_drafter

CODEBOOKS = ("predecessor_codebook", "successor_codebook")
LARGE = ("fc", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
WHOLE = {"group_size": 32, "bits": 8}


@pytest.fixture
def folder(tmp_path):
    return save_drafter(tmp_path / "drafter")


def quantized_modules(drafter) -> set[str]:
    return {name for name, module in drafter.named_modules() if hasattr(module, "bits")}


def save(drafter, folder, quantization: dict, config: dict = V2):
    """A pre-quantized checkpoint, as mlx-lm's converter writes one."""
    weights = dict(tree_flatten(drafter.parameters()))
    return save_drafter(folder, config | {"quantization": quantization}, weights)


# --- quantized at load


def first_candidates(case: str, drafter) -> tuple[np.ndarray, np.ndarray]:
    """Best candidate and logits of every row of every round of a golden case."""
    target, context, position = HeadTarget(case), drafter.make_context(), 0
    best, logits = [], []
    for golden in rounds(case):
        taps = mx.array(golden["taps"])
        drafter.extend(context, mx.zeros(taps.shape[1]), taps, position)
        position += taps.shape[1]
        masks = [drafter.args.mask_token_id] * (int(golden["block"]) - 1)
        hidden = drafter(target.embed(mx.array([[int(golden["anchor"]), *masks]])), context)
        rows = target.head(hidden)
        path = drafter.candidate_selector(mx.array([int(golden["anchor"])]), hidden, rows)
        best.append(np.array(path.candidates[0, :, 0]))
        logits.append(np.array(rows[0]))
    return np.concatenate(best), np.concatenate(logits)


def largest_error(found: np.ndarray, expected: np.ndarray) -> float:
    norms = np.linalg.norm(expected, axis=-1)
    return (np.linalg.norm(found - expected, axis=-1) / norms).max()


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("dflash2")])
def test_8_bits_pick_the_candidates_of_float(case):
    best, logits = first_candidates(case, load_drafter(GOLDEN / case))
    drafter = load_drafter(GOLDEN / case, bits=8, group_size=32)
    close, approximate = first_candidates(case, drafter)
    assert np.mean(close == best) >= 0.95
    # Random weights: each layer's rounding is amplified by the next.
    assert 0 < largest_error(approximate, logits) <= 0.1


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_computes_what_its_numbers_say(bits):
    case = "dflash2_sliding_block8"
    drafter = load_drafter(GOLDEN / case, bits=bits, group_size=32)
    _, logits = first_candidates(case, drafter)
    numbers = []
    for name, module in drafter.named_modules():
        if hasattr(module, "bits"):
            packed = module.weight, module.scales, module.biases
            numbers.append((f"{name}.weight", mx.dequantize(*packed, 32, bits)))
    assert len(numbers) == 1 + 7 * len(drafter.layers)
    expected = load_drafter(GOLDEN / case)
    expected.load_weights(numbers, strict=False)
    assert largest_error(logits, first_candidates(case, expected)[1]) <= 1e-4


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [32, 64])
def test_only_the_large_matrices_are_quantized(bits, group_size, folder):
    drafter = load_drafter(folder, bits=bits, group_size=group_size, dtype=mx.bfloat16)
    names = quantized_modules(drafter)
    assert len(names) == 1 + 7 * 2 and {name.split(".")[-1] for name in names} == set(LARGE)
    for _, module in drafter.named_modules():
        if hasattr(module, "bits"):
            assert (module.bits, module.group_size) == (bits, group_size)
    for name, value in tree_flatten(drafter.parameters()):
        assert value.dtype in (mx.uint32, mx.bfloat16), name


def test_a_group_that_does_not_divide_leaves_float_with_one_warning(folder):
    with pytest.warns(UserWarning, match=r"10 matrices .*`group_size` 128") as caught:
        drafter = load_drafter(folder, bits=4, group_size=128)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert {name.split(".")[-1] for name in quantized_modules(drafter)} == {
        *("fc", "o_proj", "down_proj")
    }
    assert mx.isfinite(block_of(drafter)).all().item()


@pytest.mark.parametrize(
    "option, value",
    [
        *(("bits", value) for value in (0, 2, 3, 15, "4", True, 4.0)),
        *(("group_size", value) for value in (0, 16, 48, "64", True, 64.0, None)),
        *(("dtype", value) for value in (mx.float16, mx.int32, "bfloat16")),
    ],
    ids=lambda value: repr(value),
)
def test_options_refused(option, value, folder):
    assert f"`{option}`" in refused(ValueError, load_drafter, folder, **{option: value})


# --- quantized as stored


@pytest.mark.parametrize("bits", [4, 8])
def test_saved_and_reloaded_gives_the_same(bits, folder, tmp_path):
    drafter = load_drafter(folder, bits=bits, group_size=32)
    stored = save(drafter, tmp_path / "stored", {"group_size": 32, "bits": bits})
    again = load_drafter(stored)
    assert quantized_modules(again) == quantized_modules(drafter)
    assert mx.array_equal(block_of(again), block_of(drafter)).item()
    message = refused(ValueError, load_drafter, stored, bits=bits)
    assert "already quantized" in message and f"`bits` is {bits}" in message


@pytest.mark.parametrize("scheme", ["affine 4 64", "affine 5 32", "mxfp4", "nvfp4", "mxfp8"])
def test_modes_of_whole_drafters(scheme, folder, tmp_path):
    """mlx-lm's converter quantizes every matrix, codebooks too."""
    mode, *numbers = scheme.split()
    entry = {"mode": mode} | dict(zip(("bits", "group_size"), map(int, numbers), strict=False))
    config = nested(selector_rank=64)
    drafter = load_drafter(save_drafter(tmp_path / "float", config))
    nn.quantize(drafter, **entry)
    again = load_drafter(save(drafter, tmp_path / "stored", entry, config))
    assert len(quantized_modules(again)) == 1 + 9 * 2 + 3
    assert mx.array_equal(block_of(again), block_of(drafter)).item()
    ids, hidden = mx.array([3]), block_of(again)
    logits = mx.sin(mx.arange(7 * 512).reshape(1, 7, 512))
    first, second = (d.candidate_selector(ids, hidden, logits) for d in (drafter, again))
    assert mx.array_equal(first.tokens, second.tokens).item()


@pytest.mark.parametrize("prefix", ["", "model."], ids=["plain", "model. prefix"])
@pytest.mark.parametrize("codebook", ["", "weight."], ids=["bare", "weight"])
def test_overrides_by_path(prefix, codebook, tmp_path):
    kept = {"candidate_selector.hidden_projection", "layers.0.self_attn.k_proj"}
    wide = {"layers.1.mlp.up_proj": {"bits": 8, "group_size": 64}}
    drafter = load_drafter(save_drafter(tmp_path / "float"))
    matrices = {n for n, m in drafter.named_modules() if hasattr(m, "to_quantized")}
    nn.quantize(
        drafter,
        class_predicate=lambda path, module: (
            path in matrices - kept and wide.get(path, {"bits": 4, "group_size": 32})
        ),
    )
    entry = {"bits": 4, "group_size": 32, "mode": "affine", f"{prefix}fc": True}
    entry |= {prefix + path: False for path in kept}
    entry |= {prefix + path: value for path, value in wide.items()}
    stored = save(drafter, tmp_path / "stored", entry)
    again = load_drafter(stored)
    assert quantized_modules(again) == matrices - kept
    assert again.layers[1].mlp.up_proj.bits == 8 and again.layers[0].mlp.up_proj.bits == 4
    assert mx.array_equal(block_of(again), block_of(drafter)).item()


def test_codebooks_and_speculators_configs_of_quantized_drafters(tmp_path):
    drafter = load_drafter(save_drafter(tmp_path / "float"))
    nn.quantize(drafter, class_predicate=lambda path, _: path.endswith("codebook"), **WHOLE)
    again = load_drafter(save(drafter, tmp_path / "stored", WHOLE, SPECULATORS))
    assert {name.split(".")[-1] for name in quantized_modules(again)} == set(CODEBOOKS)


def test_quantization_config_is_read_where_quantization_is_absent(folder, tmp_path):
    drafter = load_drafter(folder, bits=8, group_size=32)
    stored = save(drafter, tmp_path / "stored", WHOLE)
    write_config(stored, V2 | {"quantization_config": WHOLE})
    assert mx.array_equal(block_of(load_drafter(stored)), block_of(drafter)).item()


@pytest.mark.parametrize(
    "entry, parts",
    [
        (None, ["`quantization` is missing", "quantized"]),
        ({"group_size": 32}, ["`fc.weight`", "[64, 32]", "[64, 16]"]),
        ({"bits": 4, "group_size": 32}, ["`fc.weight`", "[64, 32]", "[64, 16]"]),
        ({"bits": 8, "group_size": 64}, ["`fc.scales`", "[64, 4]", "[64, 2]"]),
        ({"bits": 7, "group_size": 32}, ["`quantization.bits` is 7", "4, 5, 6, 8"]),
        ({"bits": "8", "group_size": 32}, ["`quantization.bits` is '8'"]),
        ({"bits": True, "group_size": 32}, ["`quantization.bits` is True"]),
        ({"bits": 8, "group_size": 16}, ["`quantization.group_size` is 16", "32, 64, 128"]),
        ({"bits": 8, "group_size": 128}, ["`quantization.group_size` is 128", "divisor of 64"]),
        (WHOLE | {"mode": "q4_k"}, ["`quantization.mode` is 'q4_k'", "mxfp4"]),
        ({"mode": "mxfp8"}, ["`fc.biases` is unexpected"]),
        ({"bits": 8, "group_size": 32, "mode": "mxfp4"}, ["`quantization.bits` is 8"]),
        (WHOLE | {"fc": False}, ["`quantization.fc` is False", "`fc.scales`"]),
        (WHOLE | {"fc": 3}, ["`quantization.fc` is 3"]),
        (WHOLE | {"fc": {"bits": 9}}, ["`quantization.fc.bits` is 9"]),
        (
            WHOLE | {"candidate_selector.predecessor_codebook": WHOLE},
            ["candidate_selector.predecessor_codebook` is", "scales`"],
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_quantization_at_odds_with_the_tensors(entry, parts, folder, tmp_path):
    drafter = load_drafter(folder, bits=8, group_size=32)
    stored = save(drafter, tmp_path / "stored", WHOLE)
    write_config(stored, V2 | {"quantization": entry})
    message = refused(ValueError, load_drafter, stored)
    assert all(part in message for part in parts)


def test_a_quantized_config_over_float_tensors_is_refused(folder):
    write_config(folder, V2 | {"quantization": WHOLE})
    message = refused(ValueError, load_drafter, folder)
    assert "`quantization`" in message and "absent" in message and ".scales" in message


def test_the_stored_config_is_not_changed(folder):
    before = (folder / "config.json").read_bytes()
    load_drafter(folder, bits=4)
    assert (folder / "config.json").read_bytes() == before
    assert json.loads(before) == V2
