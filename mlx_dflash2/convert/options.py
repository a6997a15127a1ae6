"""The options of `mlx_dflash2.convert`."""

import argparse
from collections.abc import Sequence

from ..checkpoint.defaults import BITS, DEFAULT_BITS, DTYPE_NAMES, GROUP_SIZE, GROUP_SIZES
from ..cli.arguments import add_unsupported_arguments
from ..cli.parser import Parser

UNSUPPORTED = {
    "--q-mode": "a drafter is quantized in affine mode, as its codebooks need it",
    "--quant-predicate": "a drafter's large matrices all take the same bits; its codebooks have "
    "--q-codebook-bits",
    "--trust-remote-code": "a drafter has no code of its own",
}


def setup_arg_parser() -> argparse.ArgumentParser:
    """Set up and return the argument parser."""
    parser = Parser(
        "mlx_dflash2.convert",
        "Convert a DFlash drafter to MLX format, and quantize it if asked to",
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
        help="Path to save the drafter, which must not exist yet (default: %(default)s)",
    )
    _add_quantization(parser)
    parser.add_argument(
        "--dtype",
        type=str,
        choices=DTYPE_NAMES,
        default="bfloat16",
        help="Dtype of everything that is not quantized; float16 overflows in drafters "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--upload-repo",
        type=str,
        default=None,
        help="The Hugging Face repo to upload the drafter to",
    )
    parser.add_argument("--revision", type=str, default=None, help="Revision of the Hub repo")
    add_unsupported_arguments(parser, UNSUPPORTED)
    return parser


def _add_quantization(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-q",
        "--quantize",
        action="store_true",
        help="Quantize the large matrices and the selector's codebooks",
    )
    bits, sizes = (", ".join(map(str, values)) for values in (BITS, GROUP_SIZES))
    for flag, text in (
        ("--q-bits", f"Bits per weight: {bits} (default: {DEFAULT_BITS})"),
        ("--q-group-size", f"Group size: {sizes} (default: {GROUP_SIZE})"),
        ("--q-codebook-bits", "Bits per weight of the codebooks (default: as --q-bits)"),
    ):
        parser.add_argument(flag, type=int, default=None, help=text)
    parser.add_argument(
        "-d", "--dequantize", action="store_true", help="Dequantize a quantized drafter"
    )


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    return setup_arg_parser().parse_args(argv)
