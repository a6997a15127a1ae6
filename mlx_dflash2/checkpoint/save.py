"""Write a drafter: its config in the published layout, its tensors, and a model card."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import make_shards, save_config

from ..drafter.args import DrafterArgs
from ..drafter.fields import refuse
from ..drafter.model import Drafter
from ..drafter.rope import SLIDING
from .load import DTYPES, UNQUANTIZED, load_drafter

_ARCHITECTURES = {1: "DFlashDraftModel", 2: "DFlash2DraftModel"}
# Fields that are written as they are.
_SHAPE = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rms_norm_eps",
    "max_position_embeddings",
    "block_size",
)
_BLOCK = ("block_size", "target_layer_ids", "mask_token_id")
_DFLASH_2 = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
# Fields that most drafters leave at their defaults.
_RARE = (
    "selector_vocab_size",
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
)


def config_of(args: DrafterArgs) -> dict[str, Any]:
    """Make a drafter's config.json in the published layout, from which the same args are read.

    Args:
        args (DrafterArgs): Of a DFlash 1 or DFlash 2 drafter.

    Raises:
        ValueError: naming the field whose value the layout cannot express.
    """
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES.get(args.generation)],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "attention_bias": False,
    }
    config |= {name: getattr(args, name) for name in _SHAPE}
    config |= _layers(args)
    if args.num_target_layers_declared:
        config["num_target_layers"] = args.num_target_layers
    if args.target_hidden_size != args.hidden_size:
        config["target_hidden_size"] = args.target_hidden_size
    if args.rope_traditional:
        config["rope_is_neox_style"] = False
    names: tuple[str, ...] = _BLOCK + _DFLASH_2 if args.generation == 2 else _BLOCK
    rare = _RARE if args.generation == 2 else _RARE + _DFLASH_2
    names += tuple(name for name in rare if getattr(args, name) != getattr(DrafterArgs, name))
    config["dflash_config"] = {name: getattr(args, name) for name in names}
    if args.quantization is not None:
        config["quantization"] = args.quantization
    # Through JSON: the copy shares no list with the args, and all of it can be written.
    config = json.loads(json.dumps(config))
    _refuse_difference(DrafterArgs.from_dict(config), args)
    return config


def _layers(args: DrafterArgs) -> dict[str, Any]:
    """Make the fields that may differ from layer to layer."""
    config: dict[str, Any] = {"layer_types": args.layer_types}
    if args.sliding_window is not None:
        config["sliding_window"] = args.sliding_window
    sliding = [kind == SLIDING for kind in args.layer_types]
    if len(set(args.causal)) == 1:
        config["is_causal"] = args.causal[0]
    elif args.causal != sliding:
        # Without the field the sliding layers are causal, and no others.
        refuse("causal", args.causal, "the same for all layers, or true for just the sliding ones")
    ropes: dict[str, dict[str, Any]] = {}
    for kind, rope in zip(args.layer_types, args.rope_parameters, strict=True):
        if ropes.setdefault(kind, rope) != rope:
            refuse("rope_parameters", args.rope_parameters, f"the same for all {kind!r} layers")
    first, *others = ropes.values()
    config["rope_parameters"] = first if all(rope == first for rope in others) else ropes
    return config


def _refuse_difference(read: DrafterArgs, args: DrafterArgs) -> None:
    for field in fields(args):
        wanted, found = getattr(args, field.name), getattr(read, field.name)
        if wanted != found:
            refuse(field.name, wanted, f"{found!r}, which is what its config.json says")


def save_drafter(drafter: Drafter, path: str | Path, config: dict[str, Any], card: str) -> None:
    """Write a drafter as a folder that :func:`load_drafter` reads, whole or not at all.

    The files are read back and compared bit for bit before the folder gets its name.

    Args:
        drafter (Drafter): All its floating-point tensors are bfloat16, or all are float32.
        path (str or Path): The new folder; folders above it are made.
        config (dict): The drafter's config.json, such as :func:`config_of` gives; its dtype and
            quantization are replaced by the drafter's own.
        card (str): Text of the model card, README.md.

    Raises:
        FileExistsError: if the path exists.
        ValueError: naming the field of the config or the tensor that is wrong.
        OSError: if writing fails, or what is read back differs.
    """
    path = Path(path).expanduser().absolute()
    refuse_existing(path)
    config = _config_to_write(drafter, config)
    weights: dict[str, mx.array] = dict(tree_flatten(drafter.parameters()))
    _check_dtypes(weights, drafter.dtype)
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as partial:
        folder = Path(partial) / path.name
        folder.mkdir()
        _write_weights(folder, weights)
        save_config(config, folder / "config.json")
        (folder / "README.md").write_text(card, encoding="utf-8")
        _compare(folder, drafter.dtype, weights)
        folder.rename(path)


def refuse_existing(path: Path) -> None:
    """Refuse a path to write to that exists.

    Raises:
        FileExistsError: in one line.
    """
    if path.exists():
        raise FileExistsError(f"{path} already exists; delete it or name another path.")


def _config_to_write(drafter: Drafter, config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with the drafter's own dtype and quantization."""
    config = {
        name: value
        for name, value in config.items()
        if name not in ("quantization", "quantization_config", "torch_dtype")
    }
    read = DrafterArgs.from_dict(config)
    _refuse_difference(read, replace(drafter.args, quantization=None))
    config["dtype"] = str(drafter.dtype).rpartition(".")[2]
    section = quantization_of(drafter)
    return config if section is None else config | {"quantization": section}


def quantization_of(drafter: Drafter) -> dict[str, Any] | None:
    """Make the ``quantization`` section of a drafter's config.json.

    It states the scheme of most modules, and by path those that have another one or none.

    Returns:
        dict or None: ``None`` if nothing is quantized.
    """
    schemes: dict[str, dict[str, Any]] = {}
    for path, module in matrices(drafter):
        names = ("group_size", "bits", "mode") if "scales" in module else ()
        schemes[path] = {name: getattr(module, name) for name in names}
    counts = Counter(tuple(scheme.items()) for scheme in schemes.values() if scheme)
    if not counts:
        return None
    (most, _), *_ = counts.most_common(1)
    section = dict(most)
    return section | {path: s or False for path, s in sorted(schemes.items()) if s != section}


def matrices(drafter: Drafter) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that are quantized or could be, with their paths."""
    for path, module in drafter.named_modules():
        if "scales" in module or hasattr(module, "to_quantized"):
            yield path, module


def _check_dtypes(weights: dict[str, mx.array], dtype: mx.Dtype) -> None:
    if dtype not in DTYPES.values():
        raise ValueError(f"The drafter is {dtype} but has to be {' or '.join(DTYPES)}.")
    for name, value in weights.items():
        if mx.issubdtype(value.dtype, mx.floating) and value.dtype != dtype:
            raise ValueError(
                f"The drafter's `{name}` is {value.dtype} but has to be {dtype}, as the others."
            )


def _write_weights(folder: Path, weights: dict[str, mx.array]) -> None:
    """Write one file, or several with an index where one would be large."""
    shards = make_shards(_published(weights))
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        suffix = f"-{number:05}-of-{len(shards):05}" if len(shards) > 1 else ""
        file = f"model{suffix}.safetensors"
        mx.save_safetensors(str(folder / file), shard, metadata={"format": "mlx"})
        weight_map |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        total = sum(value.nbytes for value in weights.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        text = json.dumps(index, indent=4) + "\n"
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _published(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Rename tensors as they are published: a codebook that is not quantized has no suffix."""
    named = {}
    for name, value in weights.items():
        bare = name.removesuffix(".weight")
        plain_codebook = bare.endswith("_codebook") and f"{bare}.scales" not in weights
        named[bare if plain_codebook else name] = value
    return named


def _compare(folder: Path, dtype: mx.Dtype, weights: dict[str, mx.array]) -> None:
    """Compare the files with the drafter; loading them has checked the names."""
    drafter = load_drafter(folder, bits=UNQUANTIZED, dtype=dtype)
    found: dict[str, mx.array] = dict(tree_flatten(drafter.parameters()))
    for name, value in found.items():
        if not _same_bits(value, weights[name]):
            raise OSError(f"`{name}` differs from what was written to {folder.name}; try again.")


def _same_bits(a: mx.array, b: mx.array) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return bool(mx.array_equal(a.view(mx.uint8), b.view(mx.uint8)).item())
