"""The `mlx_dflash2.doctor` command."""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..cli.arguments import add_draft_model_arguments
from ..cli.console import note, run
from ..cli.options import Option, Range, add_options, check_ranges, flag
from ..cli.start import add_blas_argument
from ..evaluation.machine import chip_name, memory_size
from ..evaluation.machine import environment as machine
from ..evaluation.prompts import encode, read_chats
from ..evaluation.teacher_forced import write_text
from ..pairs.find import find_pair
from ..pairs.load import load_pair
from . import environment, plan
from .chips import find_chip
from .kernels import DEFAULT_REPEATS, doctor_kernels
from .repairs import likely_masks
from .trace import DEFAULT_ANCHORS, bisect

# Options that have an effect only in one way of use, with their defaults.
PLAN = {"bandwidth": None, "acceptance_length": None, "context": 1000}
KERNELS = {"repeats": DEFAULT_REPEATS}
TRACE = {"suites": ["built-in"], "limit": 1, "max_tokens": 64, "anchors": DEFAULT_ANCHORS}
_AT_LEAST_1 = Range(1)
# fmt: off
_OPTIONS = {
    "this machine, or a pair": (
        Option("model", str, None, None,
            "The path to the local model directory or Hugging Face repo of the target (default: "
            "the embedded one, where a drafter or --trace is given)"),
        Option("json", Path, None, None, "Also write the lines to this file"),
    ),
    "what a pair brings": (
        Option("bandwidth", float, None, _AT_LEAST_1, "Memory bandwidth in GB/s"),
        Option("acceptance_length", float, None, _AT_LEAST_1,
            "Tokens a round at the full block, bonus included"),
        Option("context", int, None, _AT_LEAST_1, "Tokens before the round (default: 1000)"),
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
    "whether the Metal kernels are right": (
        Option("kernels", bool, False, None, "Check and time every Metal kernel"),
        Option("repeats", int, None, _AT_LEAST_1,
            f"Launches to time (default: {DEFAULT_REPEATS})"),
    ),
}
# fmt: on


def setup_arg_parser() -> argparse.ArgumentParser:
    """Set up and return the argument parser."""
    parser = argparse.ArgumentParser(
        prog="mlx_dflash2.doctor",
        description="Without arguments: describe this machine. With a pair: predict what it "
        "brings, from configs and tensor headers alone. With --trace: find the drafter's faulty "
        "stage.",
    )
    for title, options in _OPTIONS.items():
        add_options(parser.add_argument_group(title), options)
    add_draft_model_arguments(parser)
    add_blas_argument(parser)
    return parser


def _plan(args: argparse.Namespace) -> Iterator[str]:
    pair = (args.model, args.draft_model, args.draft_bits)
    found = plan.read_plan(*pair, args.acceptance_length)
    chip = find_chip(chip_name())
    bandwidth = args.bandwidth or (chip.bandwidth[0] if chip is not None else None)
    memory = int(mx.device_info().get("max_recommended_working_set_size", 0)) or memory_size()
    return plan.report(found, args.context, bandwidth, memory)


def _trace(args: argparse.Namespace) -> Iterator[str]:
    chats = read_chats(args.suites, args.limit)
    sources = find_pair(args.model, args.draft_model, draft_bits=args.draft_bits)
    for text in sources.notes:
        note(text)
    pair = load_pair(sources)
    texts = []
    for prompt in encode(chats, pair.tokenizer):
        note(f"target writes: {prompt.suite}")
        texts.append((prompt.tokens, write_text(pair.model, prompt.tokens, args.max_tokens)))
    masks = likely_masks(pair.tokenizer, pair.drafter.args.vocab_size)
    return bisect(pair.model, pair.drafter, texts, masks, args.anchors, note).lines()


def _check(args: argparse.Namespace) -> None:
    """Refuse options without effect or out of range, and fill in the defaults of the others."""
    check_ranges(args, (option for group in _OPTIONS.values() for option in group))
    pair = args.model is not None or args.draft_model is not None
    _settle(args, KERNELS, args.kernels, "--kernels")
    if args.kernels:
        for name in ("model", "draft_model", "json", "trace"):
            if getattr(args, name):
                raise ValueError(f"{flag(name)} has no effect with --kernels.")
    _settle(args, TRACE, args.trace, "--trace")
    _settle(args, PLAN, pair and not args.trace, "a pair and without --trace")
    if args.draft_bits is not None and not (pair or args.trace):
        raise ValueError("--draft-bits has an effect only with a pair.")
    if args.json is not None and not args.json.absolute().parent.is_dir():
        raise FileNotFoundError(f"--json: there is no folder {args.json.absolute().parent}.")


def _settle(args: argparse.Namespace, defaults: dict[str, Any], used: bool, where: str) -> None:
    for name, default in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
        elif not used:
            raise ValueError(f"{flag(name)} has an effect only with {where}.")


def _command(args: argparse.Namespace) -> None:
    _check(args)
    if args.kernels:
        sys.exit(min(doctor_kernels(args.repeats), 1))
    if args.trace:
        found = _trace(args)
    else:
        found = environment.report() if args.model is args.draft_model is None else _plan(args)
    lines = []
    for line in found:
        print(line)
        lines.append(line)
    if args.json is not None:
        content = {"kind": "mlx_dflash2.doctor", "environment": machine(), "lines": lines}
        args.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Run the command."""
    args = setup_arg_parser().parse_args()
    run(lambda: _command(args))
