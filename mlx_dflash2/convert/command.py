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
from ..checkpoint.files import CONFIG_FILES, read_config, resolve
from ..checkpoint.load import DTYPES, load_drafter, read_drafter_args
from ..checkpoint.quantization import BITS, GROUP_SIZES, Quantisation
from ..checkpoint.save import refuse_existing, save_drafter
from ..checkpoint.tensors import cast
from ..cli.console import note, run
from ..drafter.model import Drafter
from ..drafter.speculators import from_speculators, is_speculators

CARD_FILES = ("README.md",)


def setup_arg_parser() -> argparse.ArgumentParser:
    """Set up and return the argument parser."""
    parser = argparse.ArgumentParser(
        prog="mlx_dflash2.convert",
        description="Convert a DFlash drafter to MLX format, quantised if asked to",
    )
    parser.add_argument(
        "--hf-path",
        "--model",
        type=str,
        required=True,
        help="Path to the drafter: a local directory or a Hugging Face Hub repo",
    )
    parser.add_argument(
        "--mlx-path",
        type=str,
        default="mlx_model",
        help="Path to save the drafter, which may not exist (default: %(default)s)",
    )
    _add_quantisation(parser)
    parser.add_argument(
        "--dtype",
        type=str,
        choices=tuple(DTYPES),
        default="bfloat16",
        help="Type of what is not quantized (default: %(default)s)",
    )
    parser.add_argument(
        "--upload-repo",
        type=str,
        default=None,
        help="The Hugging Face repo to upload the drafter to",
    )
    parser.add_argument("--revision", type=str, default=None, help="Revision of the Hub repo")
    return parser


def _add_quantisation(parser: argparse.ArgumentParser):
    parser.add_argument(
        "-q",
        "--quantize",
        action="store_true",
        help="Quantize the large matrices and the selector's codebooks",
    )
    bits, sizes = (", ".join(map(str, values)) for values in (BITS, GROUP_SIZES))
    for flag, text in (
        ("--q-bits", f"Bits per weight: {bits} (default: {Quantisation.bits})"),
        ("--q-group-size", f"Group size: {sizes} (default: {Quantisation.group_size})"),
        ("--q-codebook-bits", "Bits per weight of the codebooks (default: as --q-bits)"),
    ):
        parser.add_argument(flag, type=int, default=None, help=text)
    parser.add_argument(
        "-d", "--dequantize", action="store_true", help="Dequantize a quantized drafter"
    )


def convert(
    hf_path: str,
    mlx_path: str | Path = "mlx_model",
    quantisation: Quantisation | None = None,
    dequantize: bool = False,
    dtype: str = "bfloat16",
    upload_repo: str | None = None,
    revision: str | None = None,
):
    """Read a drafter, write it in MLX format, and print what was written.

    Args:
        hf_path (str): Folder or Hugging Face repository of the drafter.
        mlx_path (str or Path): The new folder. Default: ``"mlx_model"``.
        quantisation (Quantisation, optional): For an unquantised drafter. Default: ``None``.
        dequantize (bool): Undo a drafter's quantisation. Default: ``False``.
        dtype (str): ``"bfloat16"`` or ``"float32"``, of what is not quantised.
        upload_repo (str, optional): Hugging Face repository to upload to. Default: ``None``.
        revision (str, optional): Revision of the drafter's repository. Default: ``None``.

    Raises:
        OSError: if the drafter is missing, the new folder exists, or writing fails.
        ValueError: if the drafter is none, or its quantisation is at odds with what is asked.
    """
    path = Path(mlx_path).expanduser()
    refuse_existing(path)
    if upload_repo is not None:
        validate_repo_id(upload_repo)
    _check_quantised(hf_path, revision, dequantize)
    note("Loading")
    # A dequantised number is rounded once, to its new dtype.
    loaded_as = mx.float32 if dequantize else DTYPES[dtype]
    drafter = load_drafter(hf_path, dtype=loaded_as, revision=revision)
    left = []
    if quantisation is not None:
        note("Quantizing")
        left = quantisation.apply(drafter)
    if dequantize:
        note("Dequantizing")
        _dequantise(drafter, DTYPES[dtype])
    config = _published_config(hf_path, revision)
    card = _source_card(hf_path, revision)
    if card:
        card = converted_card(card, drafter)
    else:
        card = make_card(drafter, hf_path, upload_repo or path.name)
    save_drafter(drafter, path, config, card)
    for line in describe(drafter, path, left):
        print(line)
    if upload_repo is not None:
        _upload(path, upload_repo)


def _check_quantised(hf_path: str, revision: str | None, dequantize: bool):
    """Refuse by the config alone, before weights are read."""
    quantised = read_drafter_args(hf_path, revision).quantization is not None
    if quantised and not dequantize:
        raise ValueError(f"{hf_path} is already quantised; --dequantize undoes it.")
    if dequantize and not quantised:
        raise ValueError(f"{hf_path} is not quantised; leave --dequantize out.")


def _dequantise(drafter: Drafter, dtype: mx.Dtype):
    dequantize_model(drafter)
    drafter.load_weights(cast(dict(tree_flatten(drafter.parameters())), dtype))
    # One module at a time, so that the float32 numbers between are never all there.
    for module in drafter.modules():
        mx.eval([value for value in module.values() if isinstance(value, mx.array)])


def _published_config(hf_path: str, revision: str | None) -> dict[str, Any]:
    config = read_config(resolve(hf_path, revision, CONFIG_FILES))
    config = from_speculators(config) if is_speculators(config) else config
    return {name: value for name, value in config.items() if value is not None}


def _source_card(hf_path: str, revision: str | None) -> str | None:
    file = resolve(hf_path, revision, CARD_FILES) / CARD_FILES[0]
    return file.read_text(encoding="utf-8") if file.is_file() else None


def _upload(path: Path, upload_repo: str):
    file = path / CARD_FILES[0]
    card = file.read_text(encoding="utf-8")
    try:
        upload_to_hub(str(path), upload_repo)
    finally:
        # mlx-lm puts a card in its place that is about language models.
        file.write_text(card, encoding="utf-8")
    HfApi().upload_file(path_or_fileobj=file, path_in_repo=file.name, repo_id=upload_repo)


def _command(args: argparse.Namespace):
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
        Quantisation(**given) if args.quantize else None,
        args.dequantize,
        args.dtype,
        args.upload_repo,
        args.revision,
    )


def main():
    args = setup_arg_parser().parse_args()
    run(lambda: _command(args))
