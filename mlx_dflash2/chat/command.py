"""The `mlx_dflash2.chat` command."""

import argparse
import sys

import mlx.core as mx

from ..cli.arguments import (
    CACHE,
    DRAFTING,
    add_cache_arguments,
    add_drafting_arguments,
    add_max_tokens_argument,
    add_model_arguments,
    add_refused_arguments,
    add_sampling_arguments,
    add_stop_argument,
    add_template_arguments,
    check_generation,
    load_arguments,
    named,
    sampling_options,
)
from ..cli.console import note, prefill_progress, run, stoppable
from ..decode.stats import Stats
from ..pairs.load import Pair, load_pair
from .conversation import Conversation

HELP = "Commands: q ends the chat, r forgets the conversation, h shows this; Ctrl-C stops an answer"
REFUSED = {"--pipeline": "distributed decoding does not draft; use mlx_lm.chat"}


class _Stopped(Exception):
    """The user stopped an answer before its first token."""


def setup_arg_parser() -> argparse.ArgumentParser:
    """Set up and return the argument parser."""
    parser = argparse.ArgumentParser(
        prog="mlx_dflash2.chat", description="Chat with a target that has a drafter."
    )
    add_model_arguments(parser)
    add_template_arguments(parser)
    add_drafting_arguments(parser)
    add_max_tokens_argument(parser, 256)
    add_sampling_arguments(parser, seed=0)
    add_cache_arguments(parser)
    add_stop_argument(parser)
    add_refused_arguments(parser, REFUSED)
    return parser


def _command(args: argparse.Namespace):
    check_generation(args)
    pair = load_pair(**load_arguments(args), **named(args, DRAFTING), copy_drafts=args.copy_drafts)
    for token in args.extra_eos_token:
        pair.tokenizer.add_eos_token(token)
    # Once, as in mlx_lm.chat: with a seed of their own all answers would draw alike.
    mx.random.seed(args.seed)
    conversation = _conversation(args, pair)
    if args.max_kv_size is not None and hasattr(pair.model, "make_cache"):
        note("warning: --max-kv-size has no effect, as in mlx-lm: the model makes its own caches.")
    note(f"{pair.name}\n{HELP}")
    while (message := _read()) not in (None, "q"):
        if message == "r":
            conversation.reset()
            note("The conversation is forgotten.")
        elif message == "h":
            note(HELP)
        else:
            _print_answer(conversation, message)


def _conversation(args: argparse.Namespace, pair: Pair) -> Conversation:
    options = named(args, CACHE + DRAFTING) | sampling_options(args, pair.tokenizer)
    return Conversation(
        pair,
        system_prompt=args.system_prompt,
        template_config=args.chat_template_config,
        max_tokens=args.max_tokens,
        stop=args.stop,
        **options | {"seed": None},
    )


def _read() -> str | None:
    """The user's next line; ``None`` at the end of input or for Ctrl-C."""
    try:
        return input(">> " if sys.stdin.isatty() else "")
    except (EOFError, KeyboardInterrupt):
        note("")
        return None


def _print_answer(conversation: Conversation, message: str):
    """Print an answer while it comes, up to Ctrl-C, and then a line about it on stderr."""
    with stoppable() as stopped, prefill_progress() as progress:

        def update(done: int, total: int):
            progress(done, total)
            # Where no token was shown yet, this is the only place to stop at.
            if stopped() and done < total:
                raise _Stopped

        answer = conversation.answer(message, prompt_progress_callback=update)
        try:
            for response in answer:
                print(response.text, end="", flush=True)
                if stopped():
                    break
        except _Stopped:
            note("Stopped before the answer began; the message is forgotten.")
            return
        finally:
            # The caches are settled here, where a first Ctrl-C cannot disturb it.
            answer.close()
        print(flush=True)
    note(status(conversation.stats))


def status(stats: Stats) -> str:
    """One line about an answer."""
    parts = [
        f"{stats.generation_tokens} tokens",
        f"{stats.generation_tps:.1f} tokens/s",
        f"{stats.acceptance_length:.2f} tokens a round",
        f"prompt {stats.prompt_tokens} + {stats.cached_tokens} cached",
    ]
    if stats.fallback:
        parts.append(f"drafting stopped: {stats.fallback}")
    return f"[{', '.join(parts)}]"


def main():
    args = setup_arg_parser().parse_args()
    run(lambda: _command(args))
