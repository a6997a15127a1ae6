"""Compare an arm's tokens with plain decoding's, and tell a tie from a fault."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

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
    gap, noise, best = audit(model, prompt, plain[:index], rows)
    is_tie = {expected, given} == set(best) and gap <= 2 * noise
    return Parity(TIE if is_tie else DIFFERENT, index, expected, given, gap, noise)


def audit(
    model: nn.Module, prompt: Sequence[int], answer: Sequence[int], rows: int
) -> tuple[float, float, list[int]]:
    """Compute the target's next token after a history in passes of different widths.

    A ring of keys and values is summed in the order of its rows: single rows leave them in the
    ring's order, a pass of several rows puts them in the order of time. Where a cache is a ring,
    the whole answer is therefore repeated in passes of every width up to ``rows``.

    Args:
        model (nn.Module): The target.
        prompt, answer (sequence of int): All tokens before it.
        rows (int): The most rows of a pass.

    Returns:
        tuple: The gap between the single row's two best logits, the largest change of a logit in
        another pass or its rounding, and the two best tokens.
    """
    history = [*prompt, *answer]
    rows = max(1, min(rows, len(history) - 1))
    if any(isinstance(cache, RotatingKVCache) for cache in make_prompt_cache(model)):
        single = _last_logits(model, history, len(prompt), 1)
        # Rounds keep any number of their rows.
        several = [_last_logits(model, history, len(prompt), n) for n in range(2, rows + 1)]
    else:
        single = _last_logits(model, history, len(history) - 1, 1)
        several = [_last_logits(model, history, len(history) - rows, rows)]
    dtype, single = single.dtype, single.astype(mx.float32)
    best = mx.argsort(-single)[:2]
    gap = single[best[0]] - single[best[1]]
    noise = mx.max(mx.abs(single - mx.stack(several)))
    # Tokens are chosen by log probabilities in the dtype of the logits.
    noise = mx.maximum(noise, _spacing(single[best[0]] - mx.logsumexp(single), dtype))
    return cast(float, gap.item()), cast(float, noise.item()), cast(list[int], best.tolist())


def _spacing(x: mx.array, dtype: mx.Dtype) -> mx.array:
    """The distance between two neighboring numbers of a dtype around ``x``."""
    return mx.finfo(dtype).eps * 2.0 ** mx.floor(mx.log2(mx.abs(x) + 1e-9))


def _last_logits(model: nn.Module, history: Sequence[int], first: int, rows: int) -> mx.array:
    """Compute the logits [V] after a history: ``first`` tokens at once, then ``rows`` a pass."""
    cache = make_prompt_cache(model)
    tokens = mx.array(list(history))[None]
    # The last pass is whole: what is left over comes with the tokens before.
    first = max(0, min(first, len(history) - 1))
    first += (len(history) - first) % rows
    starts = [0, *range(first, len(history), rows)] if first else [*range(0, len(history), rows)]
    for start, end in pairwise([*starts, len(history)]):
        logits = model(tokens[:, start:end], cache=cache)
        mx.eval(logits, [layer.state for layer in cache])
    return logits[0, -1]
