"""What a loop refuses before it begins."""

import mlx.core as mx

from .host import integer


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


def check_widths(trained: int, block_size: int | None, verify_width: int | None) -> tuple[int, int]:
    """Block size and verify width in effect, for a drafter trained with blocks of ``trained``.

    Raises:
        ValueError: naming the one that is out of range.
    """
    block = trained if block_size is None else block_size
    if not 1 <= block <= trained:
        raise ValueError(
            f"`block_size` is {block} but has to be from 1 to {trained}, the block that the "
            "drafter was trained with."
        )
    width = block if verify_width is None else verify_width
    if not 1 <= width <= block:
        raise ValueError(f"`verify_width` is {width} but has to be from 1 to the block of {block}.")
    return block, width
