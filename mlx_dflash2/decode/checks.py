"""What a loop refuses before it begins."""

from pathlib import Path
from typing import Any

import mlx.core as mx

from .host import integer


def check_draft_model(draft_model: Any) -> None:
    """Refuse what cannot draft, such as a path or a language model.

    Raises:
        TypeError: in one line.
    """
    if isinstance(draft_model, str | Path):
        raise TypeError(
            f"`draft_model` is the path {str(draft_model)!r} but has to be a drafter: "
            "load_drafter(path) reads one."
        )
    lacks = [n for n in ("block_size", "make_context", "propose") if not hasattr(draft_model, n)]
    if lacks:
        raise TypeError(
            f"`draft_model` is a {type(draft_model).__name__} but has to be a drafter, from "
            f"load_drafter: it has no {', '.join(lacks)}."
        )


def check_ids(prompt: mx.array, vocab_size: int) -> None:
    """Refuse token ids that the target cannot embed: MLX would read other memory.

    Raises:
        ValueError: naming the id and the place.
    """
    wrong = (prompt < 0) | (prompt >= vocab_size)
    if wrong.any().item():
        index = integer(mx.argmax(wrong))
        raise ValueError(
            f"`prompt` holds token {integer(prompt[index])} at place {index} but the target has "
            f"{vocab_size} tokens; the tokenizer may be of another model."
        )


def check_widths(
    trained: int, block_size: int | None, verify_width: int | None, max_copied: int = 0
) -> tuple[int, int]:
    """Block size and verify width in effect.

    Args:
        trained (int): The block size that the drafter was trained with.
        block_size, verify_width (int, optional): As asked for.
        max_copied (int): The most drafts that are copied. Default: ``0``.

    Raises:
        ValueError: naming the one that is out of range.
    """
    block = trained if block_size is None else block_size
    if not 1 <= block <= trained:
        raise ValueError(
            f"`block_size` is {block} but has to be from 1 to {trained}, the block that the "
            "drafter was trained with."
        )
    most = max(block, max_copied + 1)
    width = most if verify_width is None else verify_width
    if not 1 <= width <= most:
        rows = f"the block of {block}" if most == block else f"{most}, as many as are copied"
        raise ValueError(f"`verify_width` is {width} but has to be from 1 to {rows}.")
    return block, width
