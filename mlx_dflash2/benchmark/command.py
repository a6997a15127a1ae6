"""The `mlx_dflash2.benchmark` command."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.nn as nn
import mlx_lm
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tqdm import tqdm

from ..checkpoint.files import resolve
from ..checkpoint.load import read_drafter_args
from ..cli.arguments import add_draft_model_argument, add_model_arguments
from ..cli.build import read_pair
from ..cli.console import note, run
from ..cli.options import Option, Range, add_options, check_ranges, flag
from ..decode.sampling import check_seed, make_sampler
from ..evaluation.machine import fingerprint
from ..evaluation.prompts import SUITES, digest, encode, read_chats
from ..pairs.find import find_pair
from . import plots
from .arms import BenchSettings, make_arms
from .compare import compare, read
from .measure import Bench
from .report import markdown
from .results import measure_all, models_of, prepare_drafters

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
    Option("verify_widths", [int], None, None,
        "Rows of the block that the target verifies, an arm each (default: the block size)"),
    Option("temps", [float], [0.0, 1.0], None, "Sampling temperatures (default: 0 1)"),
    Option("top_p", float, 0.0, None, "Sampling top-p, at temperatures above 0"),
    Option("top_k", int, 0, None, "Sampling top-k, at temperatures above 0"),
    Option("suites", [str], ["built-in"], None,
        f"built-in, {', '.join(SUITES)}, or JSONL files of prompts or chats (default: built-in)"),
    Option("limit", int, None, _COUNT, "The most prompts per suite"),
    Option("thinking", ("on", "off", "both"), None, None,
        "For chat templates with enable_thinking (default: both for these)"),
    Option("max_tokens", int, BenchSettings.max_tokens, _COUNT, "Tokens per answer", "-m"),
    Option("trials", int, 1, _COUNT, "Runs of every prompt"),
    Option("prefill_step_size", int, BenchSettings.prefill_step_size, _COUNT, "As in mlx_lm"),
    Option("seed", int, 0, None, "PRNG seed"),
    Option("recall", bool, False, None, "Also measure recall, teacher forced"),
    Option("recall_stride", int, None, _COUNT,
        "Tokens from one anchor to the next (default: 4)"),
    Option("json", Path, None, None, "Write all results to this file"),
    Option("plots", Path, None, None, "Write plots into this folder"),
)
# fmt: on


def setup_arg_parser() -> argparse.ArgumentParser:
    """Set up and return the argument parser."""
    parser = argparse.ArgumentParser(
        prog="mlx_dflash2.benchmark",
        description="Compare ways of decoding a target. `compare A.json B.json` compares two runs.",
    )
    add_model_arguments(parser)
    add_draft_model_argument(parser)
    add_options(parser, _OPTIONS)
    return parser


def setup_compare_parser() -> argparse.ArgumentParser:
    """Set up and return the argument parser of `compare`."""
    parser = argparse.ArgumentParser(
        prog="mlx_dflash2.benchmark compare", description="Compare the results of two runs."
    )
    parser.add_argument("first", help="A file that --json has written")
    parser.add_argument("second", help="Another one")
    return parser


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """Show a bar on stderr if that is a terminal."""
    with tqdm(total=total, leave=False, disable=None) as bar:

        def update(text: str) -> None:
            bar.set_description(text, refresh=False)
            bar.update()

        yield update


def _command(args: argparse.Namespace) -> None:
    settings = _check(args)
    chats = read_chats(args.suites, args.limit)
    # The pair's own drafter is as it is stored; quantized ones are further arms.
    sources = find_pair(args.model, args.draft_model)
    pair = read_pair(sources, args)
    prompts = encode(chats, pair.tokenizer, args.thinking)
    drafters = prepare_drafters(
        pair.drafter, sources.drafter, args.draft_bits, args.dflash1_model, args.no_selector
    )
    longest = max(drafter.block_size for drafter in drafters.values())
    if args.recall and args.max_tokens < longest:
        raise ValueError(
            f"--recall needs answers of a block: --max-tokens is {args.max_tokens} but has to be "
            f"{longest} or more."
        )
    draft_lm = _draft_lm(args.draft_lm, pair.tokenizer) if args.draft_lm else None
    arms = make_arms(
        drafters, args.temps, args.verify_widths or [None], draft_lm, args.num_draft_tokens or 3
    )
    bench = Bench(pair.model, pair.tokenizer, drafters, arms, prompts, settings, args.trials)
    with _progress(bench.num_runs + len(arms)) as progress:
        results = measure_all(bench, (args.recall_stride or 4) if args.recall else None, progress)
    results["models"] = models_of(sources, args.dflash1_model, args.draft_lm)
    results["prompts"] = {"sha256": digest(prompts), "count": len(prompts), "from": args.suites}
    results["settings"] = asdict(settings) | {"trials": args.trials, "temps": args.temps}
    results["settings"] |= {"draft_bits": args.draft_bits, "thinking": args.thinking}
    results["settings"] |= _model_changes(args)
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if args.plots is not None:
        for file in plots.save(results, args.plots):
            note(f"wrote {file}")
    print(markdown(results))


def _model_changes(args: argparse.Namespace) -> dict[str, Any]:
    """Return what flags change about the models, ``None`` for what they leave alone."""
    adapter = args.adapter_path
    return {
        "adapter": None if adapter is None else fingerprint(Path(adapter), "adapter_config.json"),
        "quantize_activations": args.quantize_activations or None,
        "dense": args.dense or None,
        "extra_eos_token": list(args.extra_eos_token) or None,
        "num_draft_tokens": (args.num_draft_tokens or 3) if args.draft_lm else None,
    }


def _draft_lm(path: str, tokenizer: TokenizerWrapper) -> nn.Module:
    """Read a draft model for mlx-lm's speculation. As in mlx-lm, its vocabulary has to match."""
    model, own, *_ = mlx_lm.load(path)
    if own.vocab_size != tokenizer.vocab_size:
        raise ValueError(
            f"--draft-lm: its tokenizer has {own.vocab_size} tokens, the target's "
            f"{tokenizer.vocab_size}; their ids do not mean the same."
        )
    return model


def _check(args: argparse.Namespace) -> BenchSettings:
    """Refuse before the models are read what would fail after the measurement."""
    above_0 = any(args.temps), "a temperature above 0"
    for name, (used, needed) in {
        "num_draft_tokens": (args.draft_lm, "--draft-lm"),
        "recall_stride": (args.recall, "--recall"),
        "top_p": above_0,
        "top_k": above_0,
    }.items():
        if getattr(args, name) and not used:
            raise ValueError(f"{flag(name)} has an effect only with {needed}.")
    check_ranges(args, _OPTIONS)
    if args.recall and 0 not in args.temps:
        raise ValueError("--recall is measured on greedy text: give 0 among --temps.")
    if args.json is not None and not args.json.absolute().parent.is_dir():
        raise FileNotFoundError(f"--json: there is no folder {args.json.absolute().parent}.")
    if args.plots is not None:
        plots.check()
    check_seed(args.seed)
    for temp in args.temps:
        make_sampler(temp, top_p=args.top_p, top_k=args.top_k)
    if args.draft_lm is not None:
        resolve(args.draft_lm, files=("config.json",))
    if args.dflash1_model is not None:
        generation = read_drafter_args(args.dflash1_model).generation
        if generation != 1:
            raise ValueError(f"--dflash1-model: {args.dflash1_model} is a DFlash {generation}.")
    return BenchSettings(args.max_tokens, args.top_p, args.top_k, args.prefill_step_size, args.seed)


def main() -> None:
    """Run the command."""
    if sys.argv[1:2] == ["compare"]:
        pair = setup_compare_parser().parse_args(sys.argv[2:])
        run(lambda: print(compare(read(pair.first), read(pair.second))))
        return
    args = setup_arg_parser().parse_args()
    run(lambda: _command(args))
