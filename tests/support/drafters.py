"""Tiny drafter checkpoints: configs of every layout, and folders with random weights."""

import json
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_dflash2.drafter.args import DrafterArgs
from mlx_dflash2.drafter.model import Drafter

SLIDING, FULL = "sliding_attention", "full_attention"

SHAPE = dict(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    intermediate_size=128, vocab_size=512, rms_norm_eps=1e-6, max_position_embeddings=4096,
)  # fmt: skip
V2_FIELDS = dict(
    block_size=8, target_layer_ids=[1, 3], mask_token_id=501, conv_kernel_size=2,
    conv_group_size=16, selector_rank=32, selector_top_k=8,
)  # fmt: skip
V2 = SHAPE | dict(
    architectures=["DFlash2DraftModel"], model_type="qwen3", hidden_act="silu", is_causal=False,
    layer_types=[SLIDING] * 2, sliding_window=16, num_target_layers=6,
    rope_parameters={"rope_theta": 1e6, "rope_type": "default"}, dflash_config=V2_FIELDS,
)  # fmt: skip
V1 = SHAPE | dict(
    architectures=["DFlashDraftModel"], model_type="qwen3", block_size=16, rope_theta=1e6,
    num_target_layers=6, dflash_config=dict(target_layer_ids=[1, 3], mask_token_id=501),
)  # fmt: skip
SPECULATORS = V2_FIELDS | dict(
    speculators_model_type="dflash2",
    speculators_config={"verifier": {"name_or_path": "x/y"}},
    transformer_layer_config=SHAPE
    | dict(rope_parameters={"rope_theta": 1e6, "rope_type": "default"})
    | dict(layer_types=[SLIDING] * 2, sliding_window=16),
    aux_hidden_state_layer_ids=[2, 4],
)
del SPECULATORS["target_layer_ids"]


def nested(**fields) -> dict:
    """The DFlash 2 config with some fields of ``dflash_config`` changed."""
    return V2 | {"dflash_config": V2_FIELDS | fields}


def without(config: dict, *names: str) -> dict:
    return {name: value for name, value in config.items() if name not in names}


def read_config(config: dict) -> DrafterArgs:
    return DrafterArgs.from_dict(json.loads(json.dumps(config)))


def refused_config(config: dict) -> str:
    with pytest.raises(ValueError) as error:
        DrafterArgs.from_dict(config)
    message = str(error.value)
    assert "\n" not in message and message.startswith("Drafter config: `")
    return message


def random_weights(config: dict, dtype: mx.Dtype = mx.float32) -> dict[str, mx.array]:
    """Every tensor of a drafter, by its published name."""
    drafter = Drafter(DrafterArgs.from_dict(config))
    weights = {}
    for path, value in tree_flatten(drafter.parameters()):
        if value.ndim > 1:
            value = mx.random.normal(value.shape) * value.shape[-1] ** -0.5
        weights[path.replace("_codebook.weight", "_codebook")] = value.astype(dtype)
    mx.eval(weights)
    return weights


def write_config(folder: Path, config: dict) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_drafter(folder: Path, config: dict = V2, weights: dict | None = None) -> Path:
    """A checkpoint of one file; with random float32 weights if none are given."""
    write_config(folder, config)
    weights = random_weights(config) if weights is None else weights
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


def write_shards(folder: Path, weights: dict, count: int = 3) -> list[str]:
    """The weights in several files with an index; the names of the files."""
    files = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    weight_map = {name: files[i % count] for i, name in enumerate(sorted(weights))}
    for file in files:
        held = {name: weights[name] for name in weights if weight_map[name] == file}
        mx.save_safetensors(str(folder / file), held)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return files


def block_of(drafter: Drafter) -> mx.array:
    """What the drafter makes of a fixed context and block: hidden rows [1, 7, H]."""
    taps = len(drafter.args.target_layer_ids) * drafter.args.target_hidden_size
    context = drafter.make_context()
    rows = mx.sin(mx.arange(20 * taps).reshape(1, 20, taps))
    drafter.extend(context, mx.zeros(20), rows, 0)
    size = drafter.args.hidden_size
    return drafter(mx.cos(mx.arange(8 * size).reshape(1, 8, size)), context)
