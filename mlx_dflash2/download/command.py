"""The `mlx_dflash2.download` command."""

import argparse

from ..cli.console import note
from ..pairs.find import find_pair
from ..pairs.load import fetch_pair, pending_downloads


def main(args: argparse.Namespace) -> None:
    """Run the command."""
    sources = find_pair(args.model, args.draft_model, revision=args.revision)
    pending = pending_downloads(sources)
    for text in (*sources.notes, *pending):
        note(str(text))
    if not pending:
        note("Target and drafter are there already.")
    if not args.dry_run:
        target, drafter = fetch_pair(sources)
        print(f"target: {target}\ndrafter: {drafter}")
