"""Change how a chat goes on: commands that a user types instead of a message."""

import argparse
import re
from dataclasses import replace
from typing import Any

from ..cli.build import fit_to_tokenizer, generation_options
from ..decode.options import GenerationOptions
from ..pairs.load import Pair
from .conversation import Conversation

HELP = (
    "q ends the chat, r forgets the conversation, h shows this; Ctrl-C stops an answer.\n"
    "/temp 0.7, /max-tokens 500, /system TEXT and /drafts off (or on) change the next answers."
)
_COMMAND = re.compile(r"/([a-z-]+)(?:\s+(.*))?")


def chat_options(args: argparse.Namespace, pair: Pair) -> GenerationOptions:
    """Make the options of every answer.

    They have no seed: with one each, all answers would make the same draws. Draws depend on the
    widths of rounds, so a seed for the whole chat fixes the width, too.

    Raises:
        ValueError: naming the option that is out of range.
    """
    options = fit_to_tokenizer(generation_options(args), pair.tokenizer)
    width = options.verify_width
    if width is None and args.seed is not None:
        width = options.block_size or pair.most_rows
    return replace(options, seed=None, verify_width=width)


class Settings:
    """The options of a chat, which commands change.

    Args:
        args (argparse.Namespace): The chat's options as they were typed.
        conversation (Conversation): Whose next answers follow them.
    """

    def __init__(self, args: argparse.Namespace, conversation: Conversation) -> None:
        self.args, self.conversation = args, conversation
        self._verify_width = args.verify_width
        self._commands = {
            "temp": self._temp,
            "max-tokens": self._max_tokens,
            "system": self._system,
            "drafts": self._drafts,
        }

    def command(self, message: str) -> str | None:
        """Carry out a command.

        Returns:
            str: What to tell the user; ``None`` if the message is not a command.
        """
        found = _COMMAND.fullmatch(message.strip())
        if found is None:
            return None
        name, value = found[1], found[2] or ""
        if name not in self._commands:
            return f"There is no command /{name}.\n{HELP}"
        try:
            return self._commands[name](value)
        except ValueError as error:
            return f"/{name} is unchanged: {error}"

    def _temp(self, value: str) -> str:
        self._set(temp=float(value))
        return f"temperature {self.args.temp:g}"

    def _max_tokens(self, value: str) -> str:
        self._set(max_tokens=int(value))
        return f"at most {self.args.max_tokens} tokens"

    def _system(self, value: str) -> str:
        self.conversation.system_prompt = value or None
        return f"system prompt: {value}" if value else "no system prompt"

    def _drafts(self, value: str) -> str:
        if value not in ("on", "off"):
            raise ValueError("it has to be on or off")
        # A single row verifies nothing, while the drafter's context goes on.
        self._set(verify_width=1 if value == "off" else self._verify_width)
        return f"drafts {value}"

    def _set(self, **changed: Any) -> None:
        args = argparse.Namespace(**vars(self.args) | changed)
        options = chat_options(args, self.conversation.pair)
        # The caches are there already.
        self.conversation.options = replace(options, max_kv_size=None)
        self.args = args
