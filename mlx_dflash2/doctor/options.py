"""The options of `mlx_dflash2.doctor`."""

import argparse
from collections.abc import Sequence
from typing import Any

from ..cli.arguments import add_blas_argument, add_dense_argument, add_draft_model_arguments
from ..cli.options import Option, Range, add_options, check_ranges, flag
from ..cli.outputs import check_file, user_path
from ..cli.parser import Parser

DEFAULT_ANCHORS, DEFAULT_REPEATS = 120, 64
# Options that have an effect only in one way of use, with their defaults.
PLAN = {"bandwidth": None, "acceptance_length": None, "context": 1000, "chips": False}
KERNELS = {"repeats": DEFAULT_REPEATS}
TRACE = {"suites": ["built-in"], "limit": 1, "max_tokens": 64, "anchors": DEFAULT_ANCHORS}
_AT_LEAST_1 = Range(1)
# fmt: off
_OPTIONS = {
    "this machine, or a pair": (
        Option("model", str, None, None,
            "The path to the local model directory or Hugging Face repo of the target (default: "
            "the embedded one, where a drafter or --trace is given)"),
        Option("json", user_path, None, None, "Also write the lines to this file"),
    ),
    "what a pair brings": (
        Option("bandwidth", float, None, _AT_LEAST_1, "Memory bandwidth in GB/s"),
        Option("acceptance_length", float, None, _AT_LEAST_1,
            "Tokens a round at the full block, bonus included"),
        Option("context", int, None, _AT_LEAST_1, "Tokens before the round (default: 1000)"),
        Option("chips", bool, None, None, "Predict a round by part on each of Apple's chips"),
    ),
    "which stage is at fault": (
        Option("trace", bool, False, None, "Load the pair and try repairs of the drafter"),
        Option("suites", [str], None, None,
            "Prompts, as in mlx_dflash2.benchmark (default: built-in)"),
        Option("limit", int, None, _AT_LEAST_1, "The most prompts per suite (default: 1)"),
        Option("max_tokens", int, None, _AT_LEAST_1, "Tokens per answer (default: 64)", "-m"),
        Option("anchors", int, None, _AT_LEAST_1,
            f"The most places to draft from (default: {DEFAULT_ANCHORS})"),
    ),
    "whether the Metal kernels are right, and pay": (
        Option("kernels", bool, False, None, "Check and time every Metal kernel"),
        Option("race", bool, False, None,
            "Race the kernel for few rows against MLX's own product, on a pair's weights"),
        Option("repeats", int, None, _AT_LEAST_1,
            f"Calls to time, one after the other (default: {DEFAULT_REPEATS})"),
    ),
}
# fmt: on


def setup_arg_parser() -> argparse.ArgumentParser:
    """Set up and return the argument parser."""
    parser = Parser(
        "mlx_dflash2.doctor",
        "Without arguments: describe this machine. With a pair: predict what it "
        "brings, from configs and tensor headers alone. With --trace: find the drafter's faulty "
        "stage.",
    )
    for title, options in _OPTIONS.items():
        add_options(parser.add_argument_group(title), options)
    add_draft_model_arguments(parser)
    add_dense_argument(parser)
    add_blas_argument(parser)
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line, and refuse what :func:`check` does."""
    args = setup_arg_parser().parse_args(argv)
    check(args)
    return args


def check(args: argparse.Namespace) -> None:
    """Refuse options without effect or out of range, and fill in the defaults of the others."""
    check_ranges(args, (option for group in _OPTIONS.values() for option in group))
    pair = args.model is not None or args.draft_model is not None
    _settle(args, KERNELS, args.kernels, "--kernels")
    for mode, others in (
        ("kernels", ("model", "draft_model", "json", "trace", "race")),
        ("race", ("trace",)),
    ):
        for name in others:
            if getattr(args, mode) and getattr(args, name):
                raise ValueError(f"{flag(name)} has no effect with {flag(mode)}.")
    _settle(args, TRACE, args.trace, "--trace")
    plans = pair and not args.trace and not args.race
    _settle(args, PLAN, plans, "a pair and without --trace or --race")
    if args.dense and not args.trace:
        raise ValueError("--dense has an effect only with --trace.")
    if args.draft_bits is not None and not (pair or args.trace or args.race):
        raise ValueError("--draft-bits has an effect only with a pair.")
    if args.json is not None:
        check_file(args.json, "--json")


def _settle(args: argparse.Namespace, defaults: dict[str, Any], used: bool, where: str) -> None:
    for name, default in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
        elif not used:
            raise ValueError(f"{flag(name)} has an effect only with {where}.")
