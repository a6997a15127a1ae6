"""How much of the target's own text a drafter could have drafted."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.nn as nn
from mlx_lm.generate import wired_limit

from ..drafter.model import Drafter
from ..targets import bind
from .teacher_forced import (
    CANDIDATES,
    DraftQuality,
    TextPass,
    acceptance_length,
    measure_drafts,
    recall,
)


def recall_table(
    model: nn.Module,
    drafter: Drafter,
    texts: Sequence[tuple[Sequence[int], Sequence[int]]],
    stride: int = 1,
    progress: Callable[[str], object] = lambda _: None,
) -> dict[str, Any]:
    """Measure the headroom of a pair on text that its target wrote.

    Args:
        model (nn.Module): The target.
        drafter (Drafter): The drafter.
        texts (sequence): Prompt and greedy answer, as token ids.
        stride (int): Tokens of an answer from one anchor to the next.
        progress (callable): Called with a description before each text.

    Returns:
        dict: By position, recall of the best token and among the candidates, each where all drafts
        before were right, and the selector's accuracy where the true token is a candidate; then
        the acceptance length of the best tokens, of the path, and of an oracle that chooses
        among the candidates.

    Raises:
        ValueError: if no answer is longer than a block.
    """
    target, length = bind(model), drafter.block_size - 1
    parts = []
    for number, (prompt, answer) in enumerate(texts, start=1):
        if len(answer) <= length:
            continue
        progress(f"recall, text {number} of {len(texts)}")
        with wired_limit(model):
            text = TextPass(target, [*prompt, *answer], len(prompt), drafter.target_layer_ids)
            parts.append(measure_drafts(drafter, text, text.anchors(length, stride)))
    if not parts:
        raise ValueError(
            f"Recall needs answers of more than {length} tokens; give a larger --max-tokens."
        )
    return _table(drafter, DraftQuality.joined(parts))


def _table(drafter: Drafter, quality: DraftQuality) -> dict[str, Any]:
    chosen = [
        float(column[among].mean()) if among.any() else None
        for column, among in zip(quality.chosen.T, quality.among.T, strict=True)
    ]
    return {
        "anchors": len(quality.best),
        "candidates": drafter.args.selector_top_k or CANDIDATES,
        "recall_best": recall(quality.best),
        "recall_candidates": recall(quality.among),
        "selector_accuracy": chosen if drafter.args.has_selector else None,
        "acceptance_best": acceptance_length(quality.best),
        "acceptance_path": acceptance_length(quality.path),
        "acceptance_oracle": acceptance_length(quality.among),
    }
