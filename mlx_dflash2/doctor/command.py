"""The `mlx_dflash2.doctor` command."""

import argparse

import mlx.core as mx

from .. import embedded
from ..arguments import add_draft_model_arguments, add_model_arguments
from ..benchmark.data import encode, read_rows
from ..console import note, run
from ..load_pair import load_pair
from ..machine import chip_name, memory_size
from ..registry import default_drafter
from ..teacher_forced import write_text
from . import environment, plan
from .chips import find_chip
from .trace import DEFAULT_ANCHORS, bisect
from .trials import likely_masks


def setup_arg_parser() -> argparse.ArgumentParser:
    """Set up and return the argument parser."""
    parser = argparse.ArgumentParser(
        prog="mlx_dflash2.doctor",
        description="Without arguments: this machine. With a pair: what it should bring, from its "
        "configs and headers alone. With --trace: which stage of the drafter is at fault.",
    )
    add_model_arguments(parser)
    add_draft_model_arguments(parser)
    parser.add_argument("--bandwidth", type=float, help="Memory bandwidth in GB/s")
    parser.add_argument(
        "--acceptance-length", type=float, help="Tokens a round at the full block, bonus included"
    )
    parser.add_argument(
        "--context", type=int, default=1000, help="Tokens before the round (default: %(default)s)"
    )
    parser.add_argument(
        "--trace", action="store_true", help="Load the pair and find the stage at fault"
    )
    parser.add_argument(
        "--suites", nargs="+", default=["built-in"], help="Prompts of --trace, as in benchmark"
    )
    parser.add_argument(
        "--limit", type=int, default=1, help="The most prompts a suite (default: %(default)s)"
    )
    parser.add_argument(
        "--max-tokens", "-m", type=int, default=64, help="Tokens an answer (default: %(default)s)"
    )
    parser.add_argument(
        "--anchors", type=int, default=DEFAULT_ANCHORS, help="The most anchors of --trace"
    )
    return parser


def _environment():
    for line in environment.report():
        print(line)


def _plan(args: argparse.Namespace):
    model, draft_model = args.model, args.draft_model
    if model is None:
        model, draft_model = embedded.target_path(), draft_model or embedded.drafter_path()
    found = plan.read_plan(
        model, draft_model or default_drafter(model), args.draft_bits, args.acceptance_length
    )
    chip = find_chip(chip_name())
    bandwidth = args.bandwidth or (chip.bandwidth[0] if chip is not None else None)
    memory = mx.device_info().get("max_recommended_working_set_size") or memory_size()
    for line in plan.report(found, args.context, bandwidth, memory):
        print(line)


def _trace(args: argparse.Namespace):
    rows = read_rows(args.suites, args.limit)
    pair = load_pair(args.model, args.draft_model, draft_bits=args.draft_bits)
    texts = []
    for prompt in encode(rows, pair.tokenizer):
        note(f"target writes: {prompt.suite}")
        texts.append((prompt.tokens, write_text(pair.model, prompt.tokens, args.max_tokens)))
    masks = likely_masks(pair.tokenizer, pair.drafter.args.vocab_size)
    trace = bisect(pair.model, pair.drafter, texts, masks, args.anchors, note)
    for line in trace.lines():
        print(line)


def _command(args: argparse.Namespace):
    for name in ("context", "limit", "max_tokens", "anchors"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} has to be 1 or more.")
    if args.trace:
        _trace(args)
    elif args.model is None and args.draft_model is None:
        _environment()
    else:
        _plan(args)


def main():
    args = setup_arg_parser().parse_args()
    run(lambda: _command(args))
