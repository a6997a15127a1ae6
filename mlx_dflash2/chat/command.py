"""The `mlx_dflash2.chat` command."""

import argparse
import sys
from dataclasses import replace

import mlx.core as mx

from ..cli.arguments import (
    add_cache_arguments,
    add_drafting_arguments,
    add_max_tokens_argument,
    add_model_arguments,
    add_sampling_arguments,
    add_stop_argument,
    add_template_arguments,
    add_unsupported_arguments,
)
from ..cli.build import fit_to_tokenizer, generation_options, read_pair
from ..cli.console import note, prefill_progress, run, stoppable
from ..decode.defaults import CHAT_MAX_TOKENS
from ..decode.stats import Stats
from ..pairs.find import find_pair
from .conversation import Conversation

HELP = "Commands: q ends the chat, r forgets the conversation, h shows this; Ctrl-C stops an answer"
UNSUPPORTED = {"--pipeline": "distributed decoding does not draft; use mlx_lm.chat"}


class _AnswerStopped(Exception):
    """The user stopped an answer before its first token."""


def setup_arg_parser() -> argparse.ArgumentParser:
    """Set up and return the argument parser."""
    parser = argparse.ArgumentParser(
        prog="mlx_dflash2.chat", description="Chat with a target that has a drafter."
    )
    add_model_arguments(parser)
    add_template_arguments(parser)
    add_drafting_arguments(parser)
    add_max_tokens_argument(parser, CHAT_MAX_TOKENS)
    add_sampling_arguments(parser, seed=0)
    add_cache_arguments(parser)
    add_stop_argument(parser)
    add_unsupported_arguments(parser, UNSUPPORTED)
    return parser


def _command(args: argparse.Namespace) -> None:
    options = generation_options(args)
    sources = find_pair(
        args.model,
        args.draft_model,
        draft_bits=args.draft_bits,
        block_size=options.block_size,
        verify_width=options.verify_width,
    )
    pair = read_pair(sources, args)
    options = fit_to_tokenizer(options, args, pair.tokenizer)
    # Seed once, as mlx_lm.chat does: with a seed each, all answers would make the same draws.
    mx.random.seed(args.seed)
    conversation = Conversation(
        pair,
        replace(options, seed=None),
        system_prompt=args.system_prompt,
        template_config=args.chat_template_config,
    )
    note(f"{pair.name}\n{HELP}")
    while (message := _read()) not in (None, "q"):
        if message == "r":
            conversation.reset()
            note("The conversation is forgotten.")
        elif message == "h":
            note(HELP)
        else:
            _print_answer(conversation, message)


def _read() -> str | None:
    """Read the user's next line; ``None`` at the end of input or for Ctrl-C."""
    try:
        return input(">> " if sys.stdin.isatty() else "")
    except (EOFError, KeyboardInterrupt):
        note("")
        return None


def _print_answer(conversation: Conversation, message: str) -> None:
    """Print an answer while it is generated, up to Ctrl-C, and then a line about it on stderr."""
    with stoppable() as stopped, prefill_progress() as progress:

        def update(done: int, total: int) -> None:
            progress(done, total)
            # While the prompt is processed there is no other place to stop at.
            if stopped() and done < total:
                raise _AnswerStopped

        answer = conversation.answer(message, prompt_progress_callback=update)
        try:
            for response in answer:
                print(response.text, end="", flush=True)
                if stopped():
                    break
        except _AnswerStopped:
            note("Stopped before the answer began; the message is forgotten.")
            return
        finally:
            # Here a first Ctrl-C raises nothing, so the caches are settled undisturbed.
            answer.close()
        print(flush=True)
    note(status(conversation.stats))


def status(stats: Stats) -> str:
    """Describe an answer in one line."""
    parts = [
        f"{stats.generation_tokens} tokens",
        f"{stats.generation_tps:.1f} tokens/s",
        f"{stats.acceptance_length:.2f} tokens a round",
        f"prompt {stats.prompt_tokens} + {stats.cached_tokens} cached",
    ]
    if stats.fallback:
        parts.append(f"drafting stopped: {stats.fallback}")
    return f"[{', '.join(parts)}]"


def main() -> None:
    args = setup_arg_parser().parse_args()
    run(lambda: _command(args))
