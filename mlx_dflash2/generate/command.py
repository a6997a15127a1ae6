"""The `mlx_dflash2.generate` command."""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from ..checkpoint.files import CONFIG_FILES, resolve
from ..cli.build import (
    cache_metadata,
    fit_to_tokenizer,
    generation_options,
    make_constraint,
    read_pair,
)
from ..cli.console import note, prefill_progress, streamed_answer
from ..cli.together import ranks
from ..decode.cache_file import CacheFile, read_cache_file
from ..decode.generate import stream_text
from ..decode.options import GenerationOptions
from ..decode.session import DFlashPromptCache
from ..decode.stats import Stats
from ..decode.text import chat_prompt
from ..pairs.find import find_pair
from ..pairs.load import Pair
from ..targets import bind

EMBEDDED_NOTE = (
    "No --model: this is the embedded pair, SmolLM2-135M-Instruct with its drafter.\n"
    "For Qwen3.8-27B: --model mlx-community/Qwen3.8-27B-4bit"
)


def main(args: argparse.Namespace) -> None:
    """Run the command."""
    options = generation_options(args)
    prompt = args.prompt.replace("\\n", "\n").replace("\\t", "\t")
    if prompt == "-":
        all_ranks = ranks()
        prompt = all_ranks.share(sys.stdin.read() if all_ranks.rank == 0 else None)
    if ranks().size > 1 and (args.prompt_cache_file or args.save_prompt_cache):
        raise ValueError("Prompt caches of a sharded target are not kept in files.")
    model, saved, tokenizer_config = args.model, None, {}
    if args.prompt_cache_file:
        saved = read_cache_file(args.prompt_cache_file)
        model = same_model(args.model, saved)
        tokenizer_config = json.loads(saved.metadata.get("tokenizer_config", "{}"))
    sources = find_pair(
        model,
        args.draft_model,
        revision=args.revision,
        draft_bits=args.draft_bits,
        block_size=options.block_size,
        verify_width=options.verify_width,
        copy_drafts=args.copy_drafts,
    )
    if model is None:
        note(EMBEDDED_NOTE)
    pair = read_pair(sources, args, tokenizer_config)
    options = fit_to_tokenizer(options, pair.tokenizer)
    constraint = make_constraint(args, pair, bind(pair.model).vocab_size)
    options = replace(options, logits_processors=[*(options.logits_processors or ()), *constraint])
    tokens = chat_prompt(
        pair.tokenizer,
        prompt,
        system_prompt=args.system_prompt,
        prefill_response=args.prefill_response,
        use_template=not args.ignore_chat_template,
        template_config=args.chat_template_config,
        suffix_only=saved is not None,
    )
    _answer(args, pair, tokens, options, saved)


def _answer(
    args: argparse.Namespace,
    pair: Pair,
    tokens: list[int],
    options: GenerationOptions,
    saved: CacheFile | None,
) -> None:
    """Print the answer, and save the caches if asked to."""
    cache = None
    if saved is not None:
        cache = DFlashPromptCache.restore(saved, pair.model, pair.proposer)
    elif args.save_prompt_cache:
        cache = DFlashPromptCache(pair.model, pair.proposer, options.max_kv_size)
        # It has had its effect on the fresh caches.
        options = replace(options, max_kv_size=None)
    stats = Stats()
    with streamed_answer() as show, prefill_progress() as progress:
        for response in stream_text(
            pair.model,
            pair.tokenizer,
            tokens,
            pair.proposer,
            options,
            prompt_cache=cache,
            prompt_progress_callback=progress,
            stats=stats,
        ):
            show(response.text)
    if args.verbose:
        note(stats.summary())
    if cache is not None and args.save_prompt_cache:
        cache.save(args.save_prompt_cache, cache_metadata(pair, args))


def same_model(model: str | None, saved: CacheFile) -> str:
    """Return the model to go on with from a prompt cache.

    Args:
        model (str, optional): The model that is asked for.
        saved (CacheFile): The prompt cache. Where it has a fingerprint, that decides later.

    Raises:
        ValueError: if the two differ, or neither is known.
    """
    named = saved.metadata.get("model")
    if model is None and named is None:
        raise ValueError("The prompt cache does not name its model: give it with --model.")
    if model is not None and named is not None and saved.model is None:
        if model != named and _folder(model) != _folder(named):
            raise ValueError(f"`model` is {model} but has to be {named}, as in the prompt cache.")
    return str(named if model is None else model)


def _folder(model: str) -> Path | None:
    """Find a model's folder, if it is on this disk."""
    try:
        return resolve(model, files=CONFIG_FILES).resolve()
    except FileNotFoundError:
        return None
