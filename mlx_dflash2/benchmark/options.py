"""The options of `mlx_dflash2.benchmark`."""

import argparse
from collections.abc import Sequence

from ..cli.arguments import (
    add_draft_model_argument,
    add_draft_vocab_argument,
    add_model_arguments,
)
from ..cli.options import Option, Range, add_options, check_ranges, flag
from ..cli.outputs import check_file, check_folder, user_path
from ..cli.parser import Parser
from ..decode.defaults import COPY_DRAFTS, CPU_PREFILL_STEP_SIZE, PREFILL_STEP_SIZE
from ..evaluation.prompts import PACKAGED, SUITES

MAX_TOKENS = 128
QUICK_DEFAULTS = {"prompt_tokens": 512, "generation_tokens": 128, "batch_size": 1, "num_trials": 5}
_COUNT = Range(1)
# fmt: off
_OPTIONS = (
    Option("draft_bits", [(4, 8)], [], None,
        "Also run the drafter quantized at load, an arm for each"),
    Option("dflash1_model", str, None, None, "A DFlash 1 drafter of the same target"),
    Option("draft_lm", str, None, None, "A small language model for mlx-lm's own speculation"),
    Option("num_draft_tokens", int, None, _COUNT, "Its drafts per round (default: 3)"),
    Option("no_selector", bool, False, None,
        "Also run the drafter without its selector, at the first temperature: the best token of "
        "each row"),
    Option("copy_drafts", [COPY_DRAFTS], ["off"], None,
        "Copies from the text: an arm without them, with them, and with nothing else"),
    Option("verify_widths", [int], None, None,
        "Rows of the block that the target verifies, an arm each (default: the block size)"),
    Option("temps", [float], [0.0, 1.0], None, "Sampling temperatures (default: 0 1)"),
    Option("top_p", float, 0.0, None, "Sampling top-p, at temperatures above 0"),
    Option("top_k", int, 0, None, "Sampling top-k, at temperatures above 0"),
    Option("suites", [str], ["built-in"], None,
        f"{', '.join((*PACKAGED, *SUITES))}, or JSONL files of prompts or chats"),
    Option("limit", int, None, _COUNT, "The most prompts per suite"),
    Option("thinking", ("on", "off", "both"), None, None,
        "For chat templates with enable_thinking (default: both for these)"),
    Option("max_tokens", int, MAX_TOKENS, _COUNT, "Tokens per answer", "-m"),
    Option("trials", int, 1, _COUNT, "Runs of every prompt"),
    Option("prefill_step_size", int, None, _COUNT,
        f"As in mlx_lm (default: {PREFILL_STEP_SIZE}, {CPU_PREFILL_STEP_SIZE} on the CPU)"),
    Option("seed", int, 0, None, "PRNG seed"),
    Option("recall", bool, False, None, "Also measure recall, teacher forced"),
    Option("recall_stride", int, None, _COUNT,
        "Tokens from one anchor to the next (default: 4)"),
    Option("json", user_path, None, None, "Write all results to this file"),
    Option("plots", user_path, None, None, "Write plots into this folder"),
)
_QUICK = (
    Option("prompt_tokens", int, None, _COUNT, "Length of prompt (default: 512)", "-p"),
    Option("generation_tokens", int, None, _COUNT, "Length of completion (default: 128)", "-g"),
    Option("batch_size", int, None, _COUNT, "Prompts side by side (default: 1)", "-b"),
    Option("num_trials", int, None, _COUNT, "Number of timing trials (default: 5)", "-n"),
)
# fmt: on


def setup_arg_parser() -> argparse.ArgumentParser:
    """Set up and return the argument parser."""
    parser = Parser(
        "mlx_dflash2.benchmark",
        "Compare ways of decoding a target. `compare A.json B.json` compares two runs.",
    )
    add_model_arguments(parser)
    add_draft_model_argument(parser)
    add_draft_vocab_argument(parser)
    quick = "quick: speed with and without drafts, as mlx_lm.benchmark measures it"
    add_options(parser.add_argument_group(quick), _QUICK)
    add_options(parser.add_argument_group("arms, prompts and results"), _OPTIONS)
    return parser


def setup_compare_parser() -> argparse.ArgumentParser:
    """Set up and return the argument parser of `compare`."""
    parser = Parser("mlx_dflash2.benchmark compare", "Compare the results of two runs.")
    parser.add_argument("first", help="A file that --json has written")
    parser.add_argument("second", help="Another one")
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; ``first`` and ``second`` are there for `compare` alone.

    Raises:
        FileNotFoundError, ValueError: naming an option that has no effect or is out of range.
    """
    if argv[:1] == ["compare"]:
        return setup_compare_parser().parse_args(argv[1:])
    args = setup_arg_parser().parse_args(argv)
    args.quick = any(getattr(args, option.name) is not None for option in _QUICK)
    check_ranges(args, (*_OPTIONS, *_QUICK))
    if args.quick:
        _check_quick(args)
    else:
        _check(args)
    return args


def _check_quick(args: argparse.Namespace) -> None:
    """Refuse what the quick measurement does not use, and fill in its defaults."""
    for name, _, default, *_ in _OPTIONS:
        if name not in ("prefill_step_size", "copy_drafts") and getattr(args, name) != default:
            raise ValueError(f"{flag(name)} has no effect with -p, -g, -b or -n.")
    for name, default in QUICK_DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    if len(args.copy_drafts) > 1:
        raise ValueError("--copy-drafts takes one value with -p, -g, -b or -n.")


def _check(args: argparse.Namespace) -> None:
    """Refuse options without effect or out of range."""
    above_0 = any(args.temps), "a temperature above 0"
    for name, (used, needed) in {
        "num_draft_tokens": (args.draft_lm, "--draft-lm"),
        "recall_stride": (args.recall, "--recall"),
        "top_p": above_0,
        "top_k": above_0,
    }.items():
        if getattr(args, name) and not used:
            raise ValueError(f"{flag(name)} has an effect only with {needed}.")
    if args.recall and 0 not in args.temps:
        raise ValueError("--recall is measured on greedy text: give 0 among --temps.")
    if args.json is not None:
        check_file(args.json, "--json", replaced=True)
    if args.plots is not None:
        check_folder(args.plots, "--plots")
