"""The `mlx_dflash2.doctor` command."""

import argparse
import json
import sys
from collections.abc import Iterator

import mlx.core as mx

from ..cli.console import note
from ..cli.dense import check_dense, unpack
from ..evaluation.machine import chip_name, memory_size
from ..evaluation.machine import environment as machine
from ..evaluation.prompts import encode, read_chats
from ..evaluation.teacher_forced import write_text
from ..pairs.find import find_pair
from ..pairs.load import load_pair
from . import environment, plan, predict, race
from .chips import find_chip
from .kernels import doctor_kernels, why_no_kernels
from .repairs import likely_masks
from .trace import bisect


def _plan(args: argparse.Namespace) -> Iterator[str]:
    pair, chip = (args.model, args.draft_model, args.draft_bits), find_chip(chip_name())
    found = plan.read_plan(*pair, args.acceptance_length, chip, args.chips)
    if args.chips:
        return predict.report(found, args.context)
    bandwidth = args.bandwidth or (chip.bandwidth[0] if chip is not None else None)
    memory = int(mx.device_info().get("max_recommended_working_set_size", 0)) or memory_size()
    return plan.report(found, args.context, bandwidth, memory)


def _trace(args: argparse.Namespace) -> Iterator[str]:
    chats = read_chats(args.suites, args.limit)
    sources = find_pair(args.model, args.draft_model, draft_bits=args.draft_bits)
    for text in sources.notes:
        note(text)
    pair = load_pair(sources, lazy=args.dense)
    if args.dense:
        unpack(pair.drafter, pair.model)
    texts = []
    for prompt in encode(chats, pair.tokenizer):
        note(f"target writes: {prompt.suite}")
        texts.append((prompt.tokens, write_text(pair.model, prompt.tokens, args.max_tokens)))
    masks = likely_masks(pair.tokenizer, pair.drafter.args.vocab_size)
    return bisect(pair.model, pair.drafter, texts, masks, args.anchors, note).lines()


def _race(args: argparse.Namespace) -> Iterator[str]:
    if (reason := why_no_kernels()) is not None:
        raise ValueError(f"No Metal kernel runs on this machine: {reason}")
    sources = find_pair(args.model, args.draft_model, draft_bits=args.draft_bits)
    return race.table(race.race_pair(load_pair(sources)))


def main(args: argparse.Namespace) -> None:
    """Run the command."""
    check_dense(args)
    if args.kernels:
        sys.exit(min(doctor_kernels(args.repeats), 1))
    if args.trace:
        found = _trace(args)
    elif args.race:
        found = _race(args)
    else:
        found = environment.report() if args.model is args.draft_model is None else _plan(args)
    lines = []
    for line in found:
        print(line)
        lines.append(line)
    if args.json is not None:
        content = {"kind": "mlx_dflash2.doctor", "environment": machine(), "lines": lines}
        args.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
