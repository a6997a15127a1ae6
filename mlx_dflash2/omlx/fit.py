"""Whether a target and a drafter on this disk would run together in oMLX."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoint.files import read_config, read_header, weight_files
from ..checkpoint.load import is_drafter, read_drafter_args
from ..drafter.fit import check_fit
from ..targets.shape import TargetShape
from .settings import DEFAULT_GROUP_SIZE

DRAFTER_ARCHITECTURE = "DFlash2DraftModel"
_TARGET_TYPES = (
    "gemma4",
    "gemma4_text",
    "gemma4_unified",
    "laguna",
    "muse_glimmer",
    "muse_glimmer_text",
)
# A drafter with a head or an embedding of its own is refused by oMLX's runtime.
_FOREIGN_TENSORS = ("lm_head.", "embed_tokens.", "model.lm_head.", "model.embed_tokens.")


@dataclass(frozen=True)
class Pair:
    """What the settings depend on, read from two model folders that fit each other."""

    block_size: int
    target_quantized: bool
    drafter_quantized: bool
    drafter_rows: tuple[int, ...]


def check_pair(target: Path, drafter: Path) -> Pair:
    """Check two model folders with the code that binds them for decoding, and with oMLX's rules.

    Args:
        target (Path): The target's folder.
        drafter (Path): The drafter's folder.
    Returns:
        Pair: The facts that settings depend on.
    Raises:
        ValueError: If oMLX would not run them together; the line names the field.
        FileNotFoundError: If a config or a weight file is missing.
    """
    target_config = read_config(target)
    if is_drafter(target_config):
        raise ValueError(f"target: found the drafter {target}, allowed: the model it was made for")
    check_target_type(target_config.get("model_type"))
    for file in weight_files(target):
        read_header(file)
    drafter_config = read_config(drafter)
    architectures = drafter_config.get("architectures") or []
    if DRAFTER_ARCHITECTURE not in architectures:
        raise ValueError(
            f"drafter architectures: found {architectures!r}, allowed: [{DRAFTER_ARCHITECTURE!r}]"
        )
    args = read_drafter_args(drafter)
    check_fit(args, TargetShape.from_config(target_config))
    check_weights(drafter)
    rows = {
        args.hidden_size,
        args.intermediate_size,
        args.num_attention_heads * args.head_dim,
        len(args.target_layer_ids) * args.target_hidden_size,
    }
    return Pair(
        args.block_size,
        _quantized(target_config),
        _quantized(drafter_config),
        tuple(sorted(rows)),
    )


def check_quant(entry: Mapping[str, Any], pair: Pair) -> None:
    """Check that the drafter can be quantised as the settings ask for.

    Args:
        entry (dict): The settings of one model.
        pair (Pair): The facts about its drafter.
    Raises:
        ValueError: If oMLX would fail to quantise it, and fall back to plain decoding.
    """
    if not entry.get("dflash_draft_quant_enabled"):
        return
    if pair.drafter_quantized:
        raise ValueError(
            "dflash_draft_quant_enabled: found true, allowed: false, the drafter is quantised "
            "already"
        )
    group_size = entry.get("dflash_draft_quant_group_size")
    if group_size is None:
        group_size = DEFAULT_GROUP_SIZE
    if type(group_size) is not int or group_size < 1:
        # The check of single values names it.
        return
    odd = [row for row in pair.drafter_rows if row % group_size]
    if odd:
        raise ValueError(
            f"dflash_draft_quant_group_size: found {group_size}, allowed: a divisor of the "
            f"drafter's row lengths, such as {odd[0]}"
        )


def check_target_type(model_type: object) -> None:
    """Check the target's type against those that oMLX runs DFlash with.

    Args:
        model_type (str): Of the top level of the target's config.json.
    Raises:
        ValueError: If oMLX would fall back to plain decoding.
    """
    known = isinstance(model_type, str) and ("qwen" in model_type or model_type in _TARGET_TYPES)
    if not known:
        names = ", ".join(_TARGET_TYPES)
        raise ValueError(
            f"target model_type: found {model_type!r}, allowed: a Qwen type, or {names}"
        )


def check_weights(drafter: Path) -> None:
    """Check that a drafter's weight files are whole and hold nothing that oMLX refuses.

    Args:
        drafter (Path): The drafter's folder.
    Raises:
        ValueError: If a file is truncated, was damaged on the way, or holds a head of its own.
        FileNotFoundError: If a file is missing.
    """
    for file in weight_files(drafter):
        for name in read_header(file):
            if name.startswith(_FOREIGN_TENSORS):
                raise ValueError(
                    f"drafter tensor: found {name!r} in {file.name}, allowed: none of its own "
                    "head or embedding"
                )
        known = published_sha256(file)
        if known is not None:
            with open(file, "rb") as stream:
                found = hashlib.file_digest(stream, "sha256").hexdigest()
            if found != known:
                raise ValueError(
                    f"drafter file {file.name}: found sha256 {found[:12]}, allowed: {known[:12]} "
                    "as published; download it again"
                )


def published_sha256(file: Path) -> str | None:
    """The hash that the hub gave for a downloaded file, where the download left a note of it.

    Args:
        file (Path): A weight file in a hub cache, or in a folder the hub's client filled.
    Returns:
        str or None: The SHA-256 in hexadecimal.
    """
    blob = file.resolve()
    if blob.parent.name == "blobs":
        candidate = blob.name
    else:
        note = file.parent / ".cache" / "huggingface" / "download" / f"{file.name}.metadata"
        lines = note.read_text(encoding="utf-8").splitlines() if note.is_file() else []
        candidate = lines[1].strip() if len(lines) > 1 else ""
    return candidate if re.fullmatch(r"[0-9a-f]{64}", candidate) else None


def _quantized(config: dict) -> bool:
    return bool(config.get("quantization") or config.get("quantization_config"))
