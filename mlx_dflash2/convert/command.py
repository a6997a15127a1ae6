"""The `mlx_dflash2.convert` command."""

import argparse
from pathlib import Path
from typing import Any

import mlx.core as mx
from huggingface_hub import HfApi
from huggingface_hub.utils import validate_repo_id
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model, upload_to_hub

from ..checkpoint.card import converted_card, describe, make_card
from ..checkpoint.load import DTYPES, DrafterSource, find_drafter, read_drafter
from ..checkpoint.quantization import Quantization
from ..checkpoint.save import refuse_existing, save_drafter
from ..checkpoint.tensors import cast
from ..cli.console import note
from ..cli.outputs import check_folder
from ..drafter.model import Drafter
from ..drafter.speculators import from_speculators, is_speculators
from ..evaluation.machine import num_bytes

CARD_FILES = ("README.md",)


def convert(
    hf_path: str,
    mlx_path: str | Path = "mlx_model",
    quantization: Quantization | None = None,
    dequantize: bool = False,
    dtype: str = "bfloat16",
    upload_repo: str | None = None,
    revision: str | None = None,
) -> None:
    """Read a drafter, write it in MLX format, and print what was written.

    Args:
        hf_path (str): Folder or Hugging Face repository of the drafter.
        mlx_path (str or Path): The new folder. Default: ``"mlx_model"``.
        quantization (Quantization, optional): How to quantize it. Default: ``None``.
        dequantize (bool): Undo a drafter's quantization. Default: ``False``.
        dtype (str): ``"bfloat16"`` or ``"float32"``, for everything that is not quantized.
            Default: ``"bfloat16"``.
        upload_repo (str, optional): Hugging Face repository to upload to. Default: ``None``.
        revision (str, optional): Revision of the drafter's repository. Default: ``None``.

    Raises:
        OSError: if the drafter is missing, the new folder exists, or writing fails.
        ValueError: if it is not a drafter, or already is as it is asked to become.
    """
    path = Path(mlx_path).expanduser()
    refuse_existing(path)
    check_folder(path, "--mlx-path")
    if upload_repo is not None:
        validate_repo_id(upload_repo)
    source = find_drafter(hf_path, revision)
    _check_quantized(source, dequantize)
    note("Loading")
    # In float32 first, so that a dequantized number is rounded once, to its new dtype.
    drafter = read_drafter(source, dtype=mx.float32 if dequantize else DTYPES[dtype])
    left: list[str] = []
    if quantization is not None:
        note("Quantizing")
        left = quantization.apply(drafter)
    if dequantize:
        note("Dequantizing")
        _dequantize(drafter, DTYPES[dtype])
    card = _source_card(source)
    if card:
        card = converted_card(card, drafter)
    else:
        card = make_card(drafter, hf_path, upload_repo or path.name)
    check_folder(path, "--mlx-path", num_bytes(drafter))
    save_drafter(drafter, path, _published_config(source), card)
    for line in describe(drafter, path, left):
        print(line)
    if upload_repo is not None:
        _upload(path, upload_repo)


def _check_quantized(source: DrafterSource, dequantize: bool) -> None:
    """Check by the config alone, before weights are read, that there is something to do."""
    quantized = source.args.quantization is not None
    if quantized and not dequantize:
        raise ValueError(f"{source.name} is already quantized; --dequantize undoes it.")
    if dequantize and not quantized:
        raise ValueError(f"{source.name} is not quantized; leave --dequantize out.")


def _dequantize(drafter: Drafter, dtype: mx.Dtype) -> None:
    dequantize_model(drafter)
    weights: dict[str, mx.array] = dict(tree_flatten(drafter.parameters()))
    drafter.load_weights(cast(weights, dtype))
    # One module at a time, so that never all of the drafter is in float32.
    for module in drafter.modules():
        mx.eval([value for value in module.values() if isinstance(value, mx.array)])


def _published_config(source: DrafterSource) -> dict[str, Any]:
    config = source.config
    config = from_speculators(config) if is_speculators(config) else config
    return {name: value for name, value in config.items() if value is not None}


def _source_card(source: DrafterSource) -> str | None:
    file = source.fetch(CARD_FILES) / CARD_FILES[0]
    return file.read_text(encoding="utf-8") if file.is_file() else None


def _upload(path: Path, upload_repo: str) -> None:
    file = path / CARD_FILES[0]
    card = file.read_text(encoding="utf-8")
    try:
        upload_to_hub(str(path), upload_repo)
    finally:
        # mlx-lm has replaced it by a card about language models.
        file.write_text(card, encoding="utf-8")
    HfApi().upload_file(path_or_fileobj=file, path_in_repo=file.name, repo_id=upload_repo)


def main(args: argparse.Namespace) -> None:
    """Run the command."""
    if args.quantize and args.dequantize:
        raise ValueError("Choose either --quantize or --dequantize, not both.")
    given = {
        name: value
        for name in ("bits", "group_size", "codebook_bits")
        if (value := getattr(args, f"q_{name}")) is not None
    }
    if given and not args.quantize:
        flag = f"--q-{next(iter(given)).replace('_', '-')}"
        raise ValueError(f"{flag} has an effect only with --quantize.")
    convert(
        args.hf_path,
        args.mlx_path,
        Quantization(**given) if args.quantize else None,
        args.dequantize,
        args.dtype,
        args.upload_repo,
        args.revision,
    )
