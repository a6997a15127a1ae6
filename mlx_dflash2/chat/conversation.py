"""Hold a conversation whose turns continue from the caches of earlier ones."""

from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import replace
from typing import Any

from mlx_lm.generate import GenerationResponse

from ..decode.generate import stream_text
from ..decode.options import GenerationOptions
from ..decode.session import DFlashPromptCache
from ..decode.stats import Stats
from ..decode.text import chat_prompt
from ..pairs.load import Pair


class Conversation:
    """Turns of a user and a target with its drafter.

    As in mlx_lm.chat, a turn appends the chat template of its message alone, system prompt
    included, to the tokens that the caches cover.

    Args:
        pair (Pair): The target, its tokenizer and the drafter.
        options (GenerationOptions): From :meth:`GenerationOptions.for_text`.
        system_prompt (str, optional): A system message before each of the user's.
        template_config (dict, optional): More arguments of the chat template.

    Attributes:
        tokens (list of int): The conversation so far: the prompts, and the answers as far as
            they were yielded.
        stats (Stats): Counts and times of the last answer.

    Raises:
        ValueError: if the target has no chat template.
    """

    def __init__(
        self,
        pair: Pair,
        options: GenerationOptions,
        *,
        system_prompt: str | None = None,
        template_config: dict[str, Any] | None = None,
    ):
        if not pair.tokenizer.has_chat_template:
            raise ValueError(f"{pair.name} has no chat template, so there is no chat with it.")
        self.pair = pair
        self.system_prompt, self.template_config = system_prompt, template_config
        self.cache = DFlashPromptCache(pair.model, pair.proposer, options.max_kv_size)
        # It has had its effect on the fresh caches.
        self.options = replace(options, max_kv_size=None)
        self.tokens: list[int] = []
        self.stats = Stats()

    def reset(self) -> None:
        """Forget all turns."""
        size = self.cache.max_kv_size
        self.cache = DFlashPromptCache(self.pair.model, self.pair.proposer, size)
        self.tokens, self.stats = [], Stats()

    def answer(
        self,
        message: str,
        prompt_progress_callback: Callable[[int, int], None] | None = None,
    ) -> Generator[GenerationResponse, None, None]:
        """Generate the answer to a message; closing the generator ends it where it is.

        A message becomes part of the conversation with the first yielded token of its answer.

        Args:
            message (str): The user's message.
            prompt_progress_callback (callable, optional): As for
                :func:`mlx_dflash2.stream_generate`.

        Raises:
            ValueError: as :func:`mlx_dflash2.stream_generate`.
        """
        self.stats = Stats()
        prompt = chat_prompt(
            self.pair.tokenizer,
            message,
            system_prompt=self.system_prompt,
            template_config=self.template_config,
        )
        tokens = self.tokens + prompt
        responses = stream_text(
            self.pair.model,
            self.pair.tokenizer,
            # A turn that was cut short may have left more tokens in the caches than it yielded.
            self.cache.reuse(tokens),
            self.pair.proposer,
            self.options,
            prompt_cache=self.cache,
            prompt_progress_callback=prompt_progress_callback,
            stats=self.stats,
        )
        with closing(responses):
            for response in responses:
                tokens.append(response.token)
                self.tokens = tokens
                yield response
