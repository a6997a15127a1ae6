"""The `mlx_dflash2.benchmark` command."""

import argparse
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from statistics import median
from typing import Any

import mlx.nn as nn
import mlx_lm
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..checkpoint.files import resolve
from ..checkpoint.load import UNQUANTIZED, read_drafter_args
from ..cli.build import prefill_step_size, read_pair
from ..cli.console import note
from ..cli.dense import FLAG, unpack
from ..cli.outputs import user_path
from ..cli.progress import Progress
from ..decode.sampling import check_seed, make_sampler
from ..evaluation.machine import environment, fingerprint
from ..evaluation.prompts import digest, encode, read_chats
from ..pairs.find import find_pair
from . import plots
from .arms import BenchSettings, make_arms
from .compare import compare
from .file import FORMAT, KIND, read, unfinished, write
from .measure import Bench, Sample
from .quick import Lengths, Speed, measure
from .report import report
from .results import audits, figures, models_of, prepare_drafters
from .tables import Part, markdown, terminal


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """Show a bar on stderr if that is a terminal."""
    with Progress(total=total, leave=False) as bar:

        def update(text: str) -> None:
            bar.set_description(text, refresh=False)
            bar.update()

        yield update


def main(args: argparse.Namespace) -> None:
    """Run the command, or `compare`."""
    if hasattr(args, "first"):
        print(compare(read(args.first), read(args.second)))
    elif args.quick:
        _measure_quickly(args)
    else:
        _measure(args)


def _measure_quickly(args: argparse.Namespace) -> None:
    """Print a line for each trial, and the medians, as mlx_lm.benchmark does."""
    sources = find_pair(
        args.model, args.draft_model, revision=args.revision, copy_drafts=args.copy_drafts[0]
    )
    pair, trials = read_pair(sources, args), args.num_trials
    lengths = Lengths(args.prompt_tokens, args.generation_tokens, args.batch_size)
    step, pairs = prefill_step_size(args.prefill_step_size), []
    with _progress(2 * (trials + 1)) as progress:
        for number, speeds in enumerate(measure(pair, lengths, trials, step, progress), start=1):
            pairs.append(speeds)
            for name, speed in zip(("plain", "drafts"), speeds, strict=True):
                note(f"Trial {number}, {name}:  {speed}")
    plain, drafted = (
        Speed(*map(median, zip(*arm, strict=True))) for arm in zip(*pairs, strict=True)
    )
    print(f"Medians, plain:  {plain}\nMedians, drafts:  {drafted}")
    print(f"Drafts decode {drafted.generation_tps / plain.generation_tps:.2f} times as fast.")


def _measure(args: argparse.Namespace) -> None:
    settings = _check(args)
    chats = read_chats(args.suites, args.limit)
    # The pair's own drafter is as it is stored; quantized ones are further arms.
    sources = find_pair(
        args.model, args.draft_model, revision=args.revision, draft_bits=UNQUANTIZED
    )
    pair = read_pair(sources, args)
    prompts = encode(chats, pair.tokenizer, args.thinking)
    drafters = prepare_drafters(
        pair.drafter,
        sources.drafter,
        args.draft_bits,
        args.dflash1_model,
        args.no_selector,
        args.dense,
    )
    for drafter in drafters.values():
        drafter.frequent_tokens = pair.drafter.frequent_tokens
    longest = max(drafter.block_size for drafter in drafters.values())
    if args.recall and args.max_tokens < longest:
        raise ValueError(
            f"--recall needs answers of a block: --max-tokens is {args.max_tokens} but has to be "
            f"{longest} or more."
        )
    draft_lm = _draft_lm(args, pair.tokenizer) if args.draft_lm else None
    arms = make_arms(
        drafters,
        args.temps,
        args.verify_widths or [None],
        draft_lm,
        args.num_draft_tokens or 3,
        args.copy_drafts,
    )
    bench = Bench(pair.model, pair.tokenizer, drafters, arms, prompts, settings, args.trials)
    settings_of_all = asdict(settings) | {"trials": args.trials, "temps": args.temps}
    settings_of_all |= {"draft_bits": args.draft_bits, "thinking": args.thinking}
    settings_of_all["copy_drafts"] = args.copy_drafts
    plan = {
        "kind": KIND,
        "format": FORMAT,
        "environment": environment(),
        "models": models_of(sources, args.dflash1_model, args.draft_lm),
        "prompts": {"sha256": digest(prompts), "count": len(prompts), "from": args.suites},
        "settings": settings_of_all | _model_changes(args) | {"arms": [a.label for a in arms]},
    }
    samples = [Sample(**run) for run in unfinished(args.json, plan)]
    if samples:
        note(f"Going on after {len(samples)} of {bench.num_runs} runs in {args.json}.")
    results, stopped = _run(bench, plan, samples, args)
    if args.plots is not None:
        for file in plots.save(results, args.plots):
            note(f"wrote {file}")
    _print(report(results))
    if stopped:
        raise KeyboardInterrupt


def _run(
    bench: Bench, plan: dict[str, Any], samples: list[Sample], args: argparse.Namespace
) -> tuple[dict[str, Any], bool]:
    """Run what is left; return the results so far, and whether Ctrl-C stopped it."""

    def save(samples: list[Sample]) -> dict[str, Any]:
        results = plan | figures(bench, samples)
        if args.json is not None:
            write(args.json, results)
        return results

    with _progress(bench.num_runs + len(bench.arms)) as progress:
        try:
            bench.run(samples, progress, save)
        except KeyboardInterrupt:
            if not samples:
                raise
            return save(samples), True
        stride = (args.recall_stride or 4) if args.recall else None
        results = save(samples) | audits(bench, samples, stride, progress)
    if args.json is not None:
        write(args.json, results)
    return results, False


def _print(parts: list[Part]) -> None:
    """Print a report: as Markdown, or on a terminal as wide as that is."""
    if sys.stdout.isatty():
        print(terminal(parts, shutil.get_terminal_size().columns))
    else:
        print(markdown(parts))


def _model_changes(args: argparse.Namespace) -> dict[str, Any]:
    """Return what flags change about the models, ``None`` for what they leave alone."""
    adapter = args.adapter_path
    return {
        "adapter": None
        if adapter is None
        else fingerprint(user_path(adapter), "adapter_config.json"),
        "quantize_activations": args.quantize_activations or None,
        "dense": args.dense or None,
        "draft_vocab": args.draft_vocab,
        "extra_eos_token": list(args.extra_eos_token) or None,
        "num_draft_tokens": (args.num_draft_tokens or 3) if args.draft_lm else None,
    }


def _draft_lm(args: argparse.Namespace, tokenizer: TokenizerWrapper) -> nn.Module:
    """Read a draft model for mlx-lm's speculation. As in mlx-lm, its vocabulary has to match."""
    model, own, *_ = mlx_lm.load(args.draft_lm, lazy=args.dense)
    if own.vocab_size != tokenizer.vocab_size:
        raise ValueError(
            f"--draft-lm: its tokenizer has {own.vocab_size} tokens, the target's "
            f"{tokenizer.vocab_size}; their ids do not mean the same."
        )
    if args.dense:
        unpack(model, flag=f"{FLAG}, --draft-lm")
    return model


def _check(args: argparse.Namespace) -> BenchSettings:
    """Refuse before the models are read what would fail after the measurement."""
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
    step = prefill_step_size(args.prefill_step_size)
    return BenchSettings(args.max_tokens, args.top_p, args.top_k, step, args.seed)
