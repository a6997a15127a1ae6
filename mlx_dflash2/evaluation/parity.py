"""Compare an arm's tokens with plain decoding's, and tell a tie from a fault."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

IDENTICAL, TIE, DIFFERENT = "identical", "tie", "different"


@dataclass
class Parity:
    """The verdict on one greedy answer.

    Attributes:
        verdict (str): ``identical``; ``tie`` if the first difference is between the target's two
            best tokens and these are closer than its own rounding; else ``different``.
        index (int, optional): Position of the first token that differs.
        plain, found (int, optional): The two tokens there; ``None`` past an answer's end.
        gap (float, optional): The best logit minus the second, in a one-row pass.
        noise (float, optional): The largest change of a logit when the row is computed among
            several rows.
    """

    verdict: str
    index: int | None = None
    plain: int | None = None
    found: int | None = None
    gap: float | None = None
    noise: float | None = None


def compare_tokens(
    model: nn.Module,
    prompt: Sequence[int],
    plain: Sequence[int],
    found: Sequence[int],
    rows: int,
) -> Parity:
    """Compare an answer with plain decoding's, and judge the first difference.

    Args:
        model (nn.Module): The target.
        prompt (sequence of int): Its token ids.
        plain, found (sequence of int): The two answers.
        rows (int): Rows of the verify pass that gave the answer.
    """
    if list(plain) == list(found):
        return Parity(IDENTICAL)
    shared = zip(plain, found, strict=False)
    index = next((i for i, (a, b) in enumerate(shared) if a != b), min(len(plain), len(found)))
    expected = plain[index] if index < len(plain) else None
    given = found[index] if index < len(found) else None
    gap, noise, best = audit(model, [*prompt, *plain[:index]], rows)
    is_tie = {expected, given} == set(best) and gap <= 2 * noise
    return Parity(TIE if is_tie else DIFFERENT, index, expected, given, gap, noise)


def audit(model: nn.Module, history: Sequence[int], rows: int) -> tuple[float, float, list[int]]:
    """Compute the target's next token after a history twice, in passes of different widths.

    Args:
        model (nn.Module): The target.
        history (sequence of int): All tokens before it.
        rows (int): Rows of the second pass's last chunk; the first pass's is a single row.

    Returns:
        tuple: The gap between the single row's two best logits, the largest change of a logit in
        the other pass, and the two best tokens.
    """
    single = _last_logits(model, history, 1)
    several = _last_logits(model, history, max(1, min(rows, len(history) - 1)))
    best = mx.argsort(-single)[:2]
    gap = single[best[0]] - single[best[1]]
    noise = mx.max(mx.abs(single - several))
    return cast(float, gap.item()), cast(float, noise.item()), cast(list[int], best.tolist())


def _last_logits(model: nn.Module, history: Sequence[int], rows: int) -> mx.array:
    cache = make_prompt_cache(model)
    tokens = mx.array(list(history))[None]
    if len(history) > rows:
        model(tokens[:, :-rows], cache=cache)
        mx.eval([layer.state for layer in cache])
    return model(tokens[:, -rows:], cache=cache)[0, -1].astype(mx.float32)
