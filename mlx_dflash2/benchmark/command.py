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
from rich.console import Console
from rich.progress import Progress

from ..checkpoint.files import resolve
from ..checkpoint.load import read_drafter_args
from ..cli.arguments import add_draft_model_argument, add_model_arguments, load_arguments
from ..cli.console import note, run
from ..decode.sampling import check_seed, make_sampler
from ..evaluation.machine import fingerprint
from ..evaluation.prompts import PACKAGED, SUITES, digest, encode, read_rows
from ..pairs.load import load_pair, pair_paths
from . import plots
from .arms import Settings, make_arms
from .compare import compare, read
from .measure import Bench
from .report import markdown
from .results import measure_all, models_of, prepare_drafters


def setup_arg_parser() -> argparse.ArgumentParser:
    """Set up and return the argument parser."""
    parser = argparse.ArgumentParser(
        prog="mlx_dflash2.benchmark",
        description="Compare ways of decoding a target. `compare A.json B.json` compares two runs.",
    )
    add_model_arguments(parser)
    add_draft_model_argument(parser)
    _add_arms(parser)
    _add_data(parser)
    _add_output(parser)
    return parser


def _add_arms(parser: argparse.ArgumentParser):
    parser.add_argument(
        "--draft-bits",
        type=int,
        nargs="+",
        choices=(4, 8),
        default=[],
        help="Also the drafter quantised at load, an arm for each",
    )
    parser.add_argument("--dflash1-model", help="A DFlash 1 drafter of the same target")
    parser.add_argument("--draft-lm", help="A small language model for mlx-lm's own speculation")
    parser.add_argument("--num-draft-tokens", type=int, help="Its drafts a round (default: 3)")
    parser.add_argument(
        "--no-selector",
        action="store_true",
        help="Also the drafter's best token of each row, without its selector, at the first "
        "temperature",
    )
    parser.add_argument(
        "--copy-drafts",
        nargs="+",
        choices=("off", "with", "only"),
        default=["off"],
        help="Copies from the text: an arm without them, with them, and with nothing else "
        "(default: off)",
    )
    parser.add_argument(
        "--verify-widths",
        type=int,
        nargs="+",
        help="Rows of the block that the target verifies, an arm each (default: the block size)",
    )
    parser.add_argument(
        "--temps", type=float, nargs="+", default=[0.0, 1.0], help="Sampling temperatures"
    )
    parser.add_argument("--top-p", type=float, default=0.0, help="Sampling top-p, above 0 degrees")
    parser.add_argument("--top-k", type=int, default=0, help="Sampling top-k, above 0 degrees")


def _add_data(parser: argparse.ArgumentParser):
    parser.add_argument(
        "--suites",
        nargs="+",
        default=["built-in"],
        help=f"{', '.join((*PACKAGED, *SUITES))}, or JSONL files of prompts or chats "
        "(default: built-in)",
    )
    parser.add_argument("--limit", type=int, help="The most prompts a suite")
    parser.add_argument(
        "--thinking",
        choices=("on", "off", "both"),
        help="For chat templates with enable_thinking (default: both for these)",
    )
    parser.add_argument(
        "--max-tokens", "-m", type=int, default=128, help="Tokens an answer (default: %(default)s)"
    )
    parser.add_argument(
        "--trials", type=int, default=1, help="Runs of every prompt (default: %(default)s)"
    )
    parser.add_argument(
        "--prefill-step-size", type=int, default=2048, help="As in mlx_lm (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="PRNG seed (default: %(default)s)")


def _add_output(parser: argparse.ArgumentParser):
    parser.add_argument(
        "--recall", action="store_true", help="Also the headroom table, teacher forced"
    )
    parser.add_argument(
        "--recall-stride",
        type=int,
        help="Tokens from one anchor to the next (default: 4)",
    )
    parser.add_argument("--json", type=Path, help="Write all results to this file")
    parser.add_argument("--plots", type=Path, help="Write pictures into this folder")


def setup_compare_parser() -> argparse.ArgumentParser:
    """Set up and return the argument parser of `compare`."""
    parser = argparse.ArgumentParser(
        prog="mlx_dflash2.benchmark compare", description="Compare the results of two runs."
    )
    parser.add_argument("first", help="A file that --json has written")
    parser.add_argument("second", help="Another one")
    return parser


NATURAL = (
    "max_tokens",
    "trials",
    "limit",
    "recall_stride",
    "num_draft_tokens",
    "prefill_step_size",
)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr where that is a terminal."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)

        def update(text: str):
            bar.update(task, description=text, advance=1)

        yield update


def _command(args: argparse.Namespace):
    settings = _check(args)
    rows = read_rows(args.suites, args.limit)
    # The pair's own drafter is as it is stored; quantised ones are further arms.
    pair = load_pair(**load_arguments(args) | {"draft_bits": None})
    for token in args.extra_eos_token:
        pair.tokenizer.add_eos_token(token)
    prompts = encode(rows, pair.tokenizer, args.thinking)
    _, drafter_path = pair_paths(args.model, args.draft_model)
    drafters = prepare_drafters(
        pair.drafter, drafter_path, args.draft_bits, args.dflash1_model, args.no_selector
    )
    longest = max(drafter.block_size for drafter in drafters.values())
    if args.recall and args.max_tokens < longest:
        raise ValueError(
            f"--recall needs answers of a block: --max-tokens is {args.max_tokens} but has to be "
            f"{longest} or more."
        )
    draft_lm = _draft_lm(args.draft_lm, pair.tokenizer) if args.draft_lm else None
    arms = make_arms(
        drafters,
        args.temps,
        args.verify_widths or [None],
        draft_lm,
        args.num_draft_tokens or 3,
        args.copy_drafts,
    )
    bench = Bench(pair.model, pair.tokenizer, drafters, arms, prompts, settings, args.trials)
    with _progress(bench.num_runs + len(arms)) as progress:
        results = measure_all(bench, (args.recall_stride or 4) if args.recall else None, progress)
    results["models"] = models_of(args.model, args.draft_model, args.dflash1_model, args.draft_lm)
    results["prompts"] = {"sha256": digest(prompts), "count": len(prompts), "from": args.suites}
    results["settings"] = asdict(settings) | {"trials": args.trials, "temps": args.temps}
    results["settings"] |= {"draft_bits": args.draft_bits, "thinking": args.thinking}
    results["settings"]["copy_drafts"] = args.copy_drafts
    results["settings"] |= _changes(args)
    _write(results, args)
    print(markdown(results))


def _changes(args: argparse.Namespace) -> dict[str, Any]:
    """What the flags change about the models, ``None`` where they change nothing."""
    adapter = args.adapter_path
    return {
        "adapter": None if adapter is None else fingerprint(Path(adapter), "adapter_config.json"),
        "quantize_activations": args.quantize_activations or None,
        "extra_eos_token": list(args.extra_eos_token) or None,
        "num_draft_tokens": (args.num_draft_tokens or 3) if args.draft_lm else None,
    }


def _draft_lm(path: str, tokenizer: TokenizerWrapper) -> nn.Module:
    """Read a draft model for mlx-lm's speculation, refusing one of other tokens as mlx-lm does."""
    model, own = mlx_lm.load(path)
    if own.vocab_size != tokenizer.vocab_size:
        raise ValueError(
            f"--draft-lm: its tokenizer has {own.vocab_size} tokens, the target's "
            f"{tokenizer.vocab_size}; their ids do not mean the same."
        )
    return model


def _check(args: argparse.Namespace) -> Settings:
    """Refuse before the models are read what would fail after the measuring."""
    for name, used in (
        ("num_draft_tokens", args.draft_lm),
        ("recall_stride", args.recall),
        ("top_p", any(args.temps)),
        ("top_k", any(args.temps)),
    ):
        if getattr(args, name) and not used:
            needed = {"num_draft_tokens": "--draft-lm", "recall_stride": "--recall"}
            flag, other = f"--{name.replace('_', '-')}", needed.get(name, "a temperature above 0")
            raise ValueError(f"{flag} has an effect only with {other}.")
    for name in NATURAL:
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {value} but has to be 1 or more.")
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
    return Settings(args.max_tokens, args.top_p, args.top_k, args.prefill_step_size, args.seed)


def _write(results: dict[str, Any], args: argparse.Namespace):
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if args.plots is not None:
        for file in plots.save(results, args.plots):
            note(f"wrote {file}")


def _compare(args: argparse.Namespace):
    print(compare(read(args.first), read(args.second)))


def main():
    if sys.argv[1:2] == ["compare"]:
        args = setup_compare_parser().parse_args(sys.argv[2:])
        run(lambda: _compare(args))
        return
    args = setup_arg_parser().parse_args()
    run(lambda: _command(args))
