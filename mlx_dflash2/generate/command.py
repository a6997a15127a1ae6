"""The `mlx_dflash2.generate` command."""

import argparse
import json
import sys
from dataclasses import replace

from mlx_lm.generate import str2bool

from ..cli.arguments import (
    add_cache_arguments,
    add_drafting_arguments,
    add_grammar_arguments,
    add_max_tokens_argument,
    add_model_arguments,
    add_prompt_arguments,
    add_sampling_arguments,
    add_stop_argument,
    add_unsupported_arguments,
    safetensors_file,
)
from ..cli.build import fit_to_tokenizer, generation_options, make_constraint, read_pair
from ..cli.console import note, prefill_progress, run
from ..decode.cache_file import CacheFile, read_cache_file
from ..decode.defaults import GENERATE_MAX_TOKENS
from ..decode.generate import stream_text
from ..decode.options import GenerationOptions
from ..decode.session import DFlashPromptCache
from ..decode.stats import Stats
from ..decode.text import chat_prompt
from ..pairs.find import find_pair
from ..pairs.load import Pair
from ..targets import bind

UNSUPPORTED = {
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
    add_max_tokens_argument(parser, GENERATE_MAX_TOKENS)
    add_sampling_arguments(parser)
    add_cache_arguments(parser)
    add_stop_argument(parser)
    add_grammar_arguments(parser)
    parser.add_argument(
        "--prompt-cache-file",
        default=None,
        help="A file of saved caches to continue from, written by mlx_lm.cache_prompt or by "
        "--save-prompt-cache",
    )
    parser.add_argument(
        "--save-prompt-cache",
        type=safetensors_file,
        default=None,
        metavar="FILE",
        help="Write the caches of prompt and answer to a .safetensors file. As in mlx-lm, a run "
        "with --prompt-cache-file appends its prompt directly; for the turns of a chat use "
        "mlx_dflash2.chat",
    )
    add_unsupported_arguments(parser, UNSUPPORTED)
    parser.add_argument(
        "--verbose",
        type=str2bool,
        default=True,
        help="Print a summary on stderr (default: True); 'False' or 'F' prints only the response",
    )
    return parser


def _command(args: argparse.Namespace) -> None:
    options = generation_options(args)
    prompt = args.prompt.replace("\\n", "\n").replace("\\t", "\t")
    prompt = sys.stdin.read() if prompt == "-" else prompt
    model, saved, tokenizer_config = args.model, None, {}
    if args.prompt_cache_file:
        saved = read_cache_file(args.prompt_cache_file)
        model = same_model(args.model, saved.metadata.get("model"))
        tokenizer_config = json.loads(saved.metadata.get("tokenizer_config", "{}"))
    sources = find_pair(
        model,
        args.draft_model,
        draft_bits=args.draft_bits,
        block_size=options.block_size,
        verify_width=options.verify_width,
    )
    pair = read_pair(sources, args, tokenizer_config)
    options = fit_to_tokenizer(options, args, pair.tokenizer)
    constraint = make_constraint(args, pair, bind(pair.model).vocab_size)
    processors = [*(options.logits_processors or ()), *constraint]
    options = replace(options, logits_processors=processors)
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
        cache = DFlashPromptCache.restore(saved, pair.model, pair.drafter)
    elif args.save_prompt_cache:
        cache = DFlashPromptCache(pair.model, pair.drafter, options.max_kv_size)
        # It has had its effect on the fresh caches.
        options = replace(options, max_kv_size=None)
    stats = Stats()
    with prefill_progress() as progress:
        for response in stream_text(
            pair.model,
            pair.tokenizer,
            tokens,
            pair.drafter,
            options,
            prompt_cache=cache,
            prompt_progress_callback=progress,
            stats=stats,
        ):
            print(response.text, end="", flush=True)
    print()
    if args.verbose:
        note(stats.summary())
    if cache is not None and args.save_prompt_cache:
        config = json.dumps({"trust_remote_code": args.trust_remote_code})
        cache.save(args.save_prompt_cache, {"model": pair.name, "tokenizer_config": config})


def same_model(model: str | None, saved: str | None) -> str | None:
    """Return the model that a prompt cache was made with.

    Args:
        model (str, optional): The model that is asked for.
        saved (str, optional): The model that the prompt cache names.

    Raises:
        ValueError: if they differ, or neither is known.
    """
    if model is None and saved is None:
        raise ValueError("The prompt cache does not name its model: give it with --model.")
    if model is not None and saved is not None and model != saved:
        raise ValueError(f"`model` is {model} but has to be {saved}, as in the prompt cache.")
    return model if saved is None else saved


def main() -> None:
    args = setup_arg_parser().parse_args()
    run(lambda: _command(args))
