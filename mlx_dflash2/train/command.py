"""The `mlx_dflash2.train` command."""

import argparse
import sys

from ..cli.console import note
from .options import STAGES
from .run import Run


def main(args: argparse.Namespace) -> None:
    """Run the stages asked for; ask first if nothing at all was asked for."""
    run = Run(args)
    asks = not args.given and len(args.stage) == len(STAGES) and sys.stdin.isatty()
    if not asks or _confirmed(args):
        run.run()


def _confirmed(args: argparse.Namespace) -> bool:
    note(
        f"The target answers {args.num_prompts} prompts of up to {args.max_tokens} tokens, then a "
        f"drafter is trained on them for\n{args.iters} steps of {args.batch_size} texts, "
        f"exported and measured; all of it goes into the folder {args.output_path}.\n"
        "On a CPU this takes hours, and the bar of each stage tells the time left. Ctrl-C stops, "
        "and the same command\ngoes on. --help shows how to make it smaller."
    )
    return input("Begin? [y/N] ").strip().lower() in ("y", "yes")
