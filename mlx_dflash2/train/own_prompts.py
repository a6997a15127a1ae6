"""Let the target write prompts: it continues its chat template's opening of a user's turn.

A target that was trained on chats has learned what users ask (Magpie, arXiv 2406.08464).
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..evaluation.prompts import Chat, Prompt
from .corpus import Corpus
from .data import write_answers

KIND = "own"
MAX_TOKENS = 128
_CONTENT = "What the user says."


def opening(tokenizer: TokenizerWrapper) -> tuple[int, ...]:
    """Return the ids of a chat up to the user's first words.

    Raises:
        ValueError: if there is no chat template, if it changes messages, or if a user's turn does
            not end with an end-of-sequence token.
    """
    if not tokenizer.has_chat_template:
        raise ValueError("The target has no chat template, so it cannot write prompts.")
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": _CONTENT}], tokenize=False, add_generation_prompt=True
    )
    head, content, tail = chat.partition(_CONTENT)
    after = tokenizer.encode(tail, add_special_tokens=False)
    if not content or not after or after[0] not in tokenizer.eos_token_ids:
        raise ValueError(
            "The target's chat template does not end a user's turn with an end-of-sequence token, "
            "so the end of a prompt cannot be found."
        )
    return tuple(tokenizer.encode(head, add_special_tokens=False))


def own_prompts(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    folder: str | Path,
    count: int,
    **options: Any,
) -> list[Chat]:
    """Let a model write prompts, sampled at temperature 1.

    Args:
        model, tokenizer: The target and its tokenizer.
        folder (str or Path): Where they are kept, as a corpus; called again, resume.
        count (int): How many to draw; left out are those that do not end, are empty, repeat
            another one or contain a special token.
        options: ``name``, ``seed``, ``batch_size``, ``shard_size`` and ``progress`` of
            :func:`.data.write_answers`.

    Raises:
        ValueError: as :func:`opening`, or if no prompt can be used.
    """
    start = opening(tokenizer)
    drawn = [Prompt(KIND, "a user's turn", start)] * count
    options |= {"max_tokens": MAX_TOKENS, "max_seq_length": len(start) + MAX_TOKENS}
    corpus = write_answers(model, tokenizer, drawn, folder, temp=1.0, **options)
    found = [Chat(KIND, [{"role": "user", "content": text}]) for text in _texts(corpus, tokenizer)]
    if not found:
        raise ValueError(f"None of {count} prompts that the target wrote can be used.")
    return found


def _texts(corpus: Corpus, tokenizer: TokenizerWrapper) -> Iterable[str]:
    seen: set[str] = set()
    special = set(tokenizer.all_special_ids)
    for tokens, start, _ in corpus:
        said, last = tokens[start:-1].tolist(), int(tokens[-1])
        text = tokenizer.decode(said).strip()
        # A special token would open another turn within the user's.
        usable = last in tokenizer.eos_token_ids and text and not special & set(said)
        if usable and text not in seen:
            seen.add(text)
            yield text
