"""The `mlx_dflash2.chat` command."""

import argparse

import mlx.core as mx

from ..checkpoint.files import Source
from ..cli.build import generation_options, read_pair
from ..cli.console import note, prefill_progress, stoppable, streamed_answer
from ..decode.stats import Stats
from ..pairs.find import find_pair
from .conversation import Conversation
from .screen import Screen
from .settings import HELP, Settings, chat_options


class _AnswerStopped(Exception):
    """The user stopped an answer before its first token."""


def main(args: argparse.Namespace) -> None:
    """Run the command."""
    options = generation_options(args)
    sources = find_pair(
        args.model,
        args.draft_model,
        revision=args.revision,
        draft_bits=args.draft_bits,
        block_size=options.block_size,
        verify_width=options.verify_width,
        copy_drafts=args.copy_drafts,
    )
    pair = read_pair(sources, args)
    if args.seed is not None:
        # Once, as mlx_lm.chat does.
        mx.random.seed(args.seed)
    conversation = Conversation(
        pair,
        chat_options(args, pair),
        system_prompt=args.system_prompt,
        template_config=args.chat_template_config,
    )
    settings, screen = Settings(args, conversation), Screen()
    screen.header("mlx_dflash2.chat", _facts(args, conversation, sources.draft_model))
    note(HELP)
    while (message := screen.ask()) not in (None, "q"):
        if message == "r":
            conversation.reset()
            note("The conversation is forgotten.")
        elif message == "h":
            note(HELP)
        elif (told := settings.command(message)) is not None:
            note(told)
        else:
            _print_answer(conversation, message)


def _facts(
    args: argparse.Namespace, conversation: Conversation, drafter: Source | None
) -> dict[str, str]:
    """Return what the header shows, by name."""
    pair, width = conversation.pair, args.verify_width
    facts = {
        "model": pair.name,
        "adapter": args.adapter_path,
        "drafter": "copies only" if drafter is None else drafter.name,
        "rows a pass": f"up to {pair.most_rows}" if width is None else str(width),
        "max tokens": "no limit" if args.max_tokens == -1 else f"{args.max_tokens:,}",
        "system": args.system_prompt,
    }
    return {name: str(text) for name, text in facts.items() if text is not None}


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
            with streamed_answer() as show:
                for response in answer:
                    show(response.text)
                    if stopped():
                        break
        except _AnswerStopped:
            note("Stopped before the answer began; the message is forgotten.")
            return
        finally:
            # Here a first Ctrl-C raises nothing, so the caches are settled undisturbed.
            answer.close()
    note(status(conversation.stats))


def status(stats: Stats) -> str:
    """Describe an answer in one line."""
    parts = [
        f"{stats.generation_tokens} tokens",
        f"{stats.generation_tps:.1f} tokens/s",
        f"{stats.acceptance_length:.2f} tokens a round",
        f"first token after {stats.prompt_time:.2f} s",
        f"prompt {stats.prompt_tokens} + {stats.cached_tokens} cached",
    ]
    if stats.fallback:
        parts.append(f"drafting stopped: {stats.fallback}")
    return f"[{', '.join(parts)}]"
