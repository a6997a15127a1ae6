"""The `mlx_dflash2.generate` command."""

import argparse
import json
import sys

from mlx_lm.generate import str2bool

from ..cli.arguments import (
    CACHE,
    DRAFTING,
    add_cache_arguments,
    add_drafting_arguments,
    add_max_tokens_argument,
    add_model_arguments,
    add_prompt_arguments,
    add_refused_arguments,
    add_sampling_arguments,
    add_stop_argument,
    check_generation,
    load_arguments,
    named,
    safetensors_file,
    sampling_options,
)
from ..cli.console import note, prefill_progress, run
from ..decode.generate import stream_generate
from ..decode.session import DFlashPromptCache, saved_metadata
from ..decode.stats import Stats
from ..decode.text import chat_prompt
from ..pairs.load import Pair, load_pair

REFUSED = {
    "--image": "images are not drafted for; use mlx_lm.generate",
    "--num-draft-tokens": "a DFlash drafter drafts a block; see --block-size, --verify-width",
    "--use-default-chat-template": "it has no effect in mlx-lm either; leave it out",
}


def setup_arg_parser() -> argparse.ArgumentParser:
    """Set up and return the argument parser."""
    parser = argparse.ArgumentParser(
        prog="mlx_dflash2.generate", description="Generate text from a target with a drafter."
    )
    add_model_arguments(parser)
    add_prompt_arguments(parser)
    add_drafting_arguments(parser)
    add_max_tokens_argument(parser, 100)
    add_sampling_arguments(parser)
    add_cache_arguments(parser)
    add_stop_argument(parser)
    parser.add_argument(
        "--prompt-cache-file",
        default=None,
        help="A file of saved caches to go on from, written by mlx_lm.cache_prompt or by "
        "--save-prompt-cache",
    )
    parser.add_argument(
        "--save-prompt-cache",
        type=safetensors_file,
        default=None,
        metavar="FILE",
        help="Write the caches, which then cover prompt and answer, to a .safetensors file. "
        "The prompt of --prompt-cache-file comes right behind them, as in mlx-lm; for turns of a "
        "chat use mlx_dflash2.chat",
    )
    add_refused_arguments(parser, REFUSED)
    parser.add_argument(
        "--verbose",
        type=str2bool,
        default=True,
        help="Print a summary on stderr (default: True); 'False' or 'F' prints only the response",
    )
    return parser


def _command(args: argparse.Namespace):
    check_generation(args)
    prompt = args.prompt.replace("\\n", "\n").replace("\\t", "\t")
    prompt = sys.stdin.read() if prompt == "-" else prompt
    saved = saved_metadata(args.prompt_cache_file) if args.prompt_cache_file else {}
    loading = load_arguments(args)
    if args.prompt_cache_file:
        loading["model"] = same_model(args.model, saved.get("model"))
    saved_config = json.loads(saved.get("tokenizer_config", "{}"))
    loading["tokenizer_config"] = saved_config | loading["tokenizer_config"]
    pair = load_pair(**loading, **named(args, DRAFTING), copy_drafts=args.copy_drafts)
    for token in args.extra_eos_token:
        pair.tokenizer.add_eos_token(token)
    tokens = chat_prompt(
        pair.tokenizer,
        prompt,
        system_prompt=args.system_prompt,
        prefill_response=args.prefill_response,
        use_template=not args.ignore_chat_template,
        template_config=args.chat_template_config,
        suffix_only=bool(args.prompt_cache_file),
    )
    cache = None
    if args.prompt_cache_file:
        cache, _ = DFlashPromptCache.load(args.prompt_cache_file, pair.model, pair.proposer)
    elif args.save_prompt_cache:
        cache = DFlashPromptCache(pair.model, pair.proposer, args.max_kv_size)
    _print_answer(args, pair, tokens, cache)
    if args.save_prompt_cache:
        config = json.dumps({"trust_remote_code": args.trust_remote_code})
        cache.save(args.save_prompt_cache, {"model": pair.name, "tokenizer_config": config})


def _print_answer(
    args: argparse.Namespace, pair: Pair, tokens: list[int], cache: DFlashPromptCache | None
):
    options = named(args, CACHE + DRAFTING) | sampling_options(args, pair.tokenizer)
    if cache is not None and not args.prompt_cache_file:
        # The fresh cache was made with it.
        options["max_kv_size"] = None
    stats = Stats()
    with prefill_progress() as progress:
        for response in stream_generate(
            pair.model,
            pair.tokenizer,
            tokens,
            args.max_tokens,
            draft_model=pair.proposer,
            stop=args.stop,
            prompt_cache=cache,
            prompt_progress_callback=progress,
            stats=stats,
            **options,
        ):
            print(response.text, end="", flush=True)
    print()
    if args.verbose:
        note(stats.summary())


def same_model(model: str | None, saved: str | None) -> str | None:
    """The model to use with a prompt cache: the one that the cache was made with.

    Raises:
        ValueError: if another one is asked for, or neither is known.
    """
    if model is None and saved is None:
        raise ValueError("The prompt cache does not name its model: give it with `--model`.")
    if model is not None and saved is not None and model != saved:
        raise ValueError(f"`--model` is {model} but the prompt cache was made with {saved}.")
    return model if saved is None else saved


def main():
    args = setup_arg_parser().parse_args()
    run(lambda: _command(args))
