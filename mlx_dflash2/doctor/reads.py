"""Bytes that a round reads, from configs and tensor headers alone."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from math import prod
from typing import Any

from mlx_lm.models import gemma4_text

from ..checkpoint.files import TensorHeader as Stored
from ..checkpoint.tensors import QUANTIZED_AT_LOAD
from ..drafter.args import SLIDING, DrafterArgs

SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1} | {
    f"{kind}{bits}": bits // 8 for kind in "UI" for bits in (8, 16, 32, 64)
}
FLOATING = ("F64", "F32", "F16", "BF16")
# Parts of a checkpoint that mlx-lm's text model leaves out.
LEFT_OUT = ("vision", "visual", "multi_modal", "mtp.", "audio")
# One layer in so many sees everything, where a config of this model file does not say.
PATTERNS = {"muse_glimmer": 4, "gemma3_text": 6, "gpt_oss": 2}
# What a Gemma 4 config that leaves a field out means by it.
GEMMA4 = {field.name: field.default for field in fields(gemma4_text.ModelArgs)}
EMBEDDING, HEAD = "embed_tokens.", "lm_head."
# Rows of a matrix product that MLX's own quantised kernels serve with one read of the weights:
# several on a GPU, and on the CPU backend one.
ROWS_A_READ = {"gpu": 5, "cpu": 1}


def num_bytes(stored: Stored) -> int:
    return prod(stored.shape) * SIZES.get(stored.dtype, 4)


def text_tensors(tensors: dict[str, Stored]) -> dict[str, Stored]:
    """The tensors of a target's text model."""
    return {n: t for n, t in tensors.items() if not any(part in n for part in LEFT_OUT)}


def drafter_tensors(
    tensors: dict[str, Stored], dtype: str | None = None, bits: int | None = None, group: int = 64
) -> dict[str, Stored]:
    """A drafter's tensors as they are once loaded: cast, and quantised where ``bits`` is given."""
    loaded = {}
    for name, (stored_as, shape) in tensors.items():
        kept = dtype if dtype is not None and stored_as in FLOATING else stored_as
        path = name.removesuffix(".weight")
        large = path.rsplit(".", 1)[-1] in QUANTIZED_AT_LOAD and shape[-1] % group == 0
        if bits is None or not large:
            loaded[name] = Stored(kept, shape)
            continue
        rows, columns = shape
        loaded[f"{path}.weight"] = Stored("U32", (rows, columns * bits // 32))
        for part in ("scales", "biases"):
            loaded[f"{path}.{part}"] = Stored(kept, (rows, columns // group))
    return loaded


@dataclass(frozen=True)
class Reads:
    """Bytes of one round, or of a plain step, where nothing is read twice by accident.

    ``target`` and ``head`` are weights of the verify pass, ``drafter`` and ``draft_head`` those
    of the draft; ``cache`` is what attention reads of the target's past, ``context`` of the
    drafter's.
    """

    target: int
    head: int
    cache: int = 0
    drafter: int = 0
    draft_head: int = 0
    context: int = 0

    @property
    def weights(self) -> int:
        return self.target + self.head + self.drafter + self.draft_head

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.context


def target_reads(tensors: dict[str, Stored], config: dict[str, Any], rows: int) -> tuple[int, int]:
    """Bytes of a target's weights that a pass over some rows reads: all but the head, and it."""
    total = head = 0
    untied = any(HEAD in name for name in tensors)
    share = _expert_share(text_config(config), rows)
    for name, stored in tensors.items():
        size = num_bytes(stored)
        if EMBEDDING in name:
            total += size // stored.shape[0] * rows
            head += 0 if untied else size
        elif HEAD in name:
            head += size
        elif "per_layer" in name and "embed" in name:
            total += size // stored.shape[0] * rows
        elif ".switch_mlp." in name or ".experts." in name:
            total += int(size * share)
        else:
            total += size
    return total, head


def _expert_share(config: dict[str, Any], rows: int) -> float:
    """Share of the experts that some rows choose, if each chooses at random."""
    experts = config.get("num_experts") or config.get("num_local_experts")
    names = ("num_experts_per_tok", "experts_per_token", "top_k_experts")
    chosen = next((config[name] for name in names if config.get(name)), None)
    return 1 - (1 - chosen / experts) ** rows if experts and chosen else 1.0


def drafter_reads(tensors: dict[str, Stored], args: DrafterArgs) -> int:
    """Bytes of a drafter's weights that one draft reads, its context's new rows included."""
    total, length = 0, args.block_size - 1
    candidates = args.selector_top_k
    rows = {
        "predecessor_codebook": 1 + (length - 1) * candidates,
        "successor_codebook": length * candidates,
    }
    if any("codebook.scales" in name for name in tensors):
        # Quantised tables are unpacked for the anchor and all candidates alike.
        rows = dict.fromkeys(rows, 1 + length * candidates)
    for name, stored in tensors.items():
        size = num_bytes(stored)
        table = next((count for part, count in rows.items() if part in name), None)
        if table is not None:
            total += size // stored.shape[0] * table
        elif any(part in name for part in (".k_proj.", ".v_proj.", ".k_norm.")):
            # Once for the context's new rows, once for the block.
            total += 2 * size
        else:
            total += size
    return total


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """A target's config with its nested text model's fields on top."""
    text = config | (config.get("text_config") or {})
    return GEMMA4 | text if str(text.get("model_type")).startswith("gemma4") else text


def cache_layers(config: dict[str, Any]) -> Iterator[tuple[int | None, int]]:
    """For every layer that keeps keys and values, its window and the numbers in a token's keys.

    The window is ``None`` where a layer sees all.
    """
    config = text_config(config)
    count, window = config["num_hidden_layers"], config.get("sliding_window")
    interval = config.get("full_attention_interval")
    pattern = config.get("sliding_window_pattern") or PATTERNS.get(config.get("model_type"))
    kinds = config.get("layer_types") or [None] * count
    # The last layers of some read the keys and values of earlier ones.
    for index, kind in enumerate(kinds[: count - (config.get("num_kv_shared_layers") or 0)]):
        if kind == "linear_attention":
            continue
        if kind is None and interval and (index + 1) % interval:
            continue
        slides = kind == SLIDING or (kind is None and pattern and (index + 1) % pattern)
        yield (window if slides else None), _keys_width(config, slides)


def _keys_width(config: dict[str, Any], slides: bool) -> int:
    """Numbers in one token's keys, which are as many as in its values."""
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if not slides:
        width = config.get("global_head_dim") or width
        if config.get("attention_k_eq_v"):
            heads = config.get("num_global_key_value_heads") or heads
    return heads * width


def cache_bytes(config: dict[str, Any], tokens: int, size: int) -> int:
    """Bytes of a target's keys and values after some tokens, ``size`` bytes a number."""
    kept = sum(min(tokens, window or tokens) * width for window, width in cache_layers(config))
    return kept * 2 * size


def context_bytes(args: DrafterArgs, tokens: int, size: int) -> int:
    """Bytes of a drafter's context after some tokens."""
    window = (args.sliding_window or tokens + 1) - 1
    kept = [min(tokens, window) if t == SLIDING else tokens for t in args.layer_types]
    return sum(kept) * 2 * args.num_key_value_heads * args.head_dim * size


def num_reads(tensors: dict[str, Stored], rows: int, device: str) -> int:
    """How often a pass over some rows reads the weights, with MLX's own kernels."""
    quantised = any(name.endswith(".scales") for name in tensors)
    return -(-rows // ROWS_A_READ[device]) if quantised or device == "cpu" else 1
