"""Tiny drafters: configs of every layout, and random weights by their published names."""

import json

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_dflash2.drafter.args import DrafterArgs
from mlx_dflash2.drafter.model import Drafter
from support.tiny import drafter_config, random_drafter

SLIDING, FULL = "sliding_attention", "full_attention"


def without(config: dict, *names: str) -> dict:
    return {name: value for name, value in config.items() if name not in names}


V2 = drafter_config()
V2_FIELDS = V2["dflash_config"]
SHAPE = {
    name: V2[name]
    for name in (
        "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "head_dim", "intermediate_size", "vocab_size", "rms_norm_eps", "max_position_embeddings",
    )
}  # fmt: skip
V1 = SHAPE | dict(
    architectures=["DFlashDraftModel"], model_type="qwen3", block_size=16, rope_theta=1e6,
    num_target_layers=4, dflash_config=dict(target_layer_ids=[1, 3], mask_token_id=501),
)  # fmt: skip
SPECULATORS = without(V2_FIELDS, "target_layer_ids") | dict(
    speculators_model_type="dflash2",
    speculators_config={"verifier": {"name_or_path": "x/y"}},
    transformer_layer_config=SHAPE
    | {name: V2[name] for name in ("rope_parameters", "layer_types", "sliding_window")},
    aux_hidden_state_layer_ids=[2, 4],
)


def nested(**fields) -> dict:
    """The DFlash 2 config with some fields of ``dflash_config`` changed."""
    return V2 | {"dflash_config": V2_FIELDS | fields}


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
    return {
        path.replace("_codebook.weight", "_codebook"): value.astype(dtype)
        for path, value in tree_flatten(random_drafter(config).parameters())
    }


def block_of(drafter: Drafter) -> mx.array:
    """What the drafter makes of a fixed context and block: hidden rows [1, 7, H]."""
    taps = len(drafter.args.target_layer_ids) * drafter.args.target_hidden_size
    context = drafter.make_context()
    rows = mx.sin(mx.arange(20 * taps).reshape(1, 20, taps))
    drafter.extend(context, mx.zeros(20), rows, 0)
    size = drafter.args.hidden_size
    return drafter(mx.cos(mx.arange(8 * size).reshape(1, 8, size)), context)
