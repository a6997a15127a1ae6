"""The `mlx_dflash2.cache_prompt` command."""

import argparse
import sys

import mlx.core as mx

from ..cli.build import cache_metadata, prefill_step_size, read_pair
from ..cli.console import note, prefill_progress
from ..decode.generate import dflash_generate_step
from ..decode.options import GenerationOptions
from ..decode.session import DFlashPromptCache
from ..decode.stats import Stats
from ..decode.text import unfinished_prompt
from ..pairs.find import find_pair


def main(args: argparse.Namespace) -> None:
    """Run the command."""
    options = {
        "prefill_step_size": prefill_step_size(args.prefill_step_size),
        "kv_bits": args.kv_bits,
        "kv_group_size": args.kv_group_size,
        "quantized_kv_start": args.quantized_kv_start,
    }
    # Refused before weights are read.
    GenerationOptions(max_tokens=0, **options)
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    sources = find_pair(
        args.model, args.draft_model, revision=args.revision, draft_bits=args.draft_bits
    )
    pair, stats = read_pair(sources, args), Stats()
    cache = DFlashPromptCache(pair.model, pair.proposer, args.max_kv_size)
    prompt = mx.array(unfinished_prompt(pair.tokenizer, text))
    with prefill_progress() as progress:
        steps = dflash_generate_step(
            prompt,
            pair.model,
            pair.proposer,
            max_tokens=0,
            prompt_cache=cache,
            prompt_progress_callback=progress,
            stats=stats,
            **options,
        )
        for _ in steps:
            pass
    cache.save(args.prompt_cache_file, cache_metadata(pair, args))
    note(f"Processed {len(cache)} tokens, {stats.prompt_tps:.2f} tok/s")
    note(f"Peak memory: {mx.get_peak_memory() / 1e9:.3f} GB")
    print(args.prompt_cache_file)
