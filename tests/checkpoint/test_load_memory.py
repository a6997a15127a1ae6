"""What a loaded drafter is made of: its dtype, its memory, and nothing lazy for other threads."""

import gc
import threading

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from support.drafters import V2, block_of, random_weights
from support.saved_models import save_drafter

from mlx_dflash2.checkpoint.load import load_drafter
from mlx_dflash2.kernels import grouped_conv_norm

# --- dtypes


@pytest.mark.parametrize(
    "stored, asked, expected",
    [
        (mx.bfloat16, None, mx.bfloat16),
        (mx.float32, None, mx.float32),
        (mx.float16, None, mx.float32),
        (mx.float16, mx.bfloat16, mx.bfloat16),
        (mx.float32, mx.bfloat16, mx.bfloat16),
        (mx.bfloat16, mx.float32, mx.float32),
    ],
    ids=str,
)
def test_one_dtype_for_all(stored, asked, expected, tmp_path):
    folder = save_drafter(tmp_path / "drafter", V2, random_weights(V2, stored))
    drafter = load_drafter(folder, dtype=asked)
    assert {value.dtype for _, value in tree_flatten(drafter.parameters())} == {expected}
    hidden = block_of(drafter)
    assert hidden.dtype == drafter.dtype == expected
    assert mx.isfinite(hidden).all().item()


def test_a_few_wide_tensors_do_not_widen_the_rest(tmp_path):
    weights = random_weights(V2, mx.bfloat16)
    weights = {n: v.astype(mx.float32) if "norm" in n else v for n, v in weights.items()}
    drafter = load_drafter(save_drafter(tmp_path / "drafter", V2, weights))
    assert {value.dtype for _, value in tree_flatten(drafter.parameters())} == {mx.bfloat16}


@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("stored", [mx.bfloat16, mx.float16], ids=str)
def test_a_residual_beyond_float16_stays_finite(stored, bits, tmp_path, monkeypatch):
    weights = random_weights(V2, mx.float32)
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            scale = mx.where(mx.arange(64) == 5, 60000.0 / mx.abs(weights[name]).max(), 1.0)
            weights[name] = weights[name] * scale[:, None]
    weights = {name: value.astype(stored) for name, value in weights.items()}
    drafter = load_drafter(save_drafter(tmp_path / "drafter", V2, weights), bits=bits)
    residual = []

    def watched(*inputs):
        total, normed = grouped_conv_norm(*inputs)
        residual.append(mx.abs(total).max().item())
        return total, normed

    monkeypatch.setattr("mlx_dflash2.drafter.conv.grouped_conv_norm", watched)
    assert mx.isfinite(block_of(drafter)).all().item()
    assert residual[-1] > 70000


# --- memory and threads


@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("asked", [None, mx.bfloat16], ids=["as stored", "cast"])
def test_one_copy_of_every_tensor_stays_alive(bits, asked, tmp_path):
    wide = V2 | dict(intermediate_size=4096)
    folder = save_drafter(tmp_path / "drafter", wide)
    gc.collect()
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    drafter = load_drafter(folder, bits=bits, dtype=asked)
    grown, peak = mx.get_active_memory() - before, mx.get_peak_memory() - before
    held = sum(value.nbytes for _, value in tree_flatten(drafter.parameters()))
    assert held <= grown <= held * 1.02 + 2**16
    # On the way there, at most one matrix more, as stored and as cast.
    assert peak <= held + 3 * 64 * 4096 * 4
    del drafter
    gc.collect()
    assert mx.get_active_memory() - before < 2**16


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 64,
    "short_factor": [1.0] * 16,
    "long_factor": [2.0] * 16,
}
ROTATIONS = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "proportional": {"rope_type": "proportional"},
    "llama3": LLAMA3,
    "yarn": YARN,
    "longrope": LONGROPE,
}


@pytest.mark.parametrize("kind", ROTATIONS)
@pytest.mark.parametrize("bits", [None, 4])
def test_loaded_in_one_thread_used_in_others(kind, bits, tmp_path):
    config = V2 | {"rope_parameters": ROTATIONS[kind] | {"rope_theta": 1e4}}
    folder = save_drafter(tmp_path / "drafter", config)
    results = []

    def in_thread(work):
        thread = threading.Thread(target=lambda: results.append(work()))
        thread.start()
        thread.join()

    # What is first touched in a thread that did not make it must not be lazy.
    in_thread(lambda: load_drafter(folder, bits=bits))
    drafter = results.pop()
    for _ in range(2):
        in_thread(lambda: np.array(block_of(drafter).astype(mx.float32)))
    assert len(results) == 2
    np.testing.assert_array_equal(*results)
    arrays = [v for m in drafter.modules() for v in m.values() if isinstance(v, mx.array)]
    rotations = {id(v) for m in drafter.modules() for k, v in m.items() if k == "_freqs"}
    assert bool(rotations) == (kind in ("llama3", "yarn", "longrope", "proportional"))
    in_thread(lambda: [np.array(value.astype(mx.float32)) for value in arrays])
    assert len(results) == 3


def test_rotations_change_what_is_computed(tmp_path):
    weights, results = random_weights(V2), {}
    for kind, rope in ROTATIONS.items():
        config = V2 | {"rope_parameters": rope | {"rope_theta": 1e4}}
        drafter = load_drafter(save_drafter(tmp_path / kind, config, weights))
        results[kind] = np.array(block_of(drafter))
    for kind in ("linear", "llama3", "yarn", "longrope"):
        assert np.abs(results[kind] - results["default"]).max() > 1e-3, kind
    for kind in ("proportional", "dynamic"):
        np.testing.assert_allclose(results[kind], results["default"], atol=1e-5)
