"""A conversation: each turn goes on from the caches of those before."""

from collections.abc import Generator
from contextlib import closing
from typing import Any

from mlx_lm.generate import GenerationResponse

from ..decode.generate import stream_generate
from ..decode.session import DFlashPromptCache
from ..decode.stats import Stats
from ..decode.text import chat_prompt
from ..pairs.load import Pair


class Conversation:
    """Turns of a user and a target with its drafter.

    As in mlx_lm.chat, a turn adds the chat template of its message alone, the system prompt
    included, to what the caches already cover.

    Args:
        pair (Pair): The target, its tokenizer and the drafter.
        system_prompt (str, optional): A system message before each of the user's.
        template_config (dict, optional): More arguments of the chat template.
        max_kv_size (int, optional): As in mlx-lm.
        options: The remaining options of :func:`mlx_dflash2.stream_generate`.

    Attributes:
        tokens (list of int): The conversation so far: the prompts, and the answers as far as
            they were yielded.
        stats (Stats): What the last answer took.

    Raises:
        ValueError: if the target has no chat template.
    """

    def __init__(
        self,
        pair: Pair,
        *,
        system_prompt: str | None = None,
        template_config: dict[str, Any] | None = None,
        max_kv_size: int | None = None,
        **options: Any,
    ):
        if not pair.tokenizer.has_chat_template:
            raise ValueError(f"{pair.name} has no chat template, so there is no chat with it.")
        self.pair, self.max_kv_size, self.options = pair, max_kv_size, options
        self.template = {"system_prompt": system_prompt, "template_config": template_config}
        self.reset()

    def reset(self):
        """Forget all turns."""
        self.cache = DFlashPromptCache(self.pair.model, self.pair.proposer, self.max_kv_size)
        self.tokens: list[int] = []
        self.stats = Stats()

    def answer(self, message: str, **options: Any) -> Generator[GenerationResponse, None, None]:
        """The answer to a message; closing the generator ends it with what was yielded.

        A message without a yielded token of an answer does not become part of the conversation.

        Args:
            message (str): The user's message.
            options: More options of :func:`mlx_dflash2.stream_generate`, for this answer.

        Raises:
            ValueError: as :func:`mlx_dflash2.stream_generate`.
        """
        self.stats = Stats()
        tokens = self.tokens + chat_prompt(self.pair.tokenizer, message, **self.template)
        responses = stream_generate(
            self.pair.model,
            self.pair.tokenizer,
            # A turn that was cut short may have left more in the caches than was yielded.
            self.cache.reuse(tokens),
            draft_model=self.pair.proposer,
            prompt_cache=self.cache,
            stats=self.stats,
            **self.options,
            **options,
        )
        with closing(responses):
            for response in responses:
                tokens.append(response.token)
                self.tokens = tokens
                yield response
