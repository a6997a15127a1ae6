"""Prompts that the target writes itself: its chat template opens a user's turn, it goes on.

A target that was trained on chats has learned what users ask (Magpie, arXiv 2406.08464).
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..evaluation.prompts import Prompt
from .corpus import Corpus
from .data import write_answers
from .prompts import PromptRow

KIND = "own"
MAX_TOKENS = 128
_CONTENT = "What the user says."


def opening(tokenizer: TokenizerWrapper) -> tuple[int, ...]:
    """The ids of a chat up to where the user's first words stand.

    Args:
        tokenizer (TokenizerWrapper): The target's.

    Raises:
        ValueError: if there is no chat template, if it does not show a message as it is, or if
            what ends a user's turn is no end-of-sequence token.
    """
    if not tokenizer.has_chat_template:
        raise ValueError("The target has no chat template, so it writes no prompts of its own.")
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": _CONTENT}], tokenize=False, add_generation_prompt=True
    )
    head, content, tail = chat.partition(_CONTENT)
    after = tokenizer.encode(tail, add_special_tokens=False)
    if not content or not after or after[0] not in tokenizer.eos_token_ids:
        raise ValueError(
            "The target's chat template does not end a user's turn with an end-of-sequence token, "
            "so it is not seen where a prompt of its own ends."
        )
    return tuple(tokenizer.encode(head, add_special_tokens=False))


def own_prompts(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    folder: str | Path,
    count: int,
    **options: Any,
) -> list[PromptRow]:
    """Let a model write prompts, sampled at temperature 1.

    Args:
        model (nn.Module): The target, or anything that mlx-lm generates with in batches.
        tokenizer (TokenizerWrapper): Its tokenizer, with a chat template.
        folder (str or Path): Where they are kept, as texts of a corpus; called again, it goes on.
        count (int): How many are drawn; those that do not end, are empty, came before or have a
            special token within are left out.
        options: ``name``, ``seed``, ``batch_size``, ``shard_size`` and ``progress`` of
            :func:`.data.write_answers`.

    Raises:
        ValueError: as :func:`opening`, or if none of them can be used.
    """
    start = opening(tokenizer)
    drawn = [Prompt(KIND, "a user's turn", start)] * count
    limits = {"max_tokens": MAX_TOKENS, "max_seq_length": len(start) + MAX_TOKENS}
    corpus = write_answers(model, tokenizer, drawn, folder, temp=1.0, **limits, **options)
    found = list(_messages(corpus, tokenizer))
    if not found:
        raise ValueError(f"None of {count} prompts that the target wrote can be used.")
    return [PromptRow(KIND, [{"role": "user", "content": text}]) for text in found]


def _messages(corpus: Corpus, tokenizer: TokenizerWrapper) -> Iterable[str]:
    seen, special = set(), set(tokenizer.all_special_ids)
    for tokens, start, _ in corpus:
        said, last = tokens[start:-1].tolist(), int(tokens[-1])
        text = tokenizer.decode(said).strip()
        # A special token would open a turn of somebody else's within the user's.
        usable = last in tokenizer.eos_token_ids and text and not special & set(said)
        if usable and text not in seen:
            seen.add(text)
            yield text
