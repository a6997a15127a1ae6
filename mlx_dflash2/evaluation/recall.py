"""How much of the target's own text a drafter could have drafted: recall and attention by layer."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..drafter.context import LayerContext
from ..drafter.model import Drafter
from ..targets import bind
from .teacher_forced import CANDIDATES, Forced, Replay, acceptance_length, measure, recall


def recall_table(
    model: nn.Module,
    drafter: Drafter,
    texts: Sequence[tuple[Sequence[int], Sequence[int]]],
    stride: int = 1,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """The headroom of a pair on text that its target wrote.

    Args:
        model (nn.Module): The target.
        drafter (Drafter): The drafter.
        texts (sequence): Prompt and greedy answer, as token ids.
        stride (int): Tokens of an answer from one anchor to the next.
        progress (callable): Called with a description before each text.

    Returns:
        dict: By position, recall of the best token and among the candidates, each where all rows
        before were right, and the selector's accuracy where the true token is a candidate; then
        the acceptance length of the best tokens, of the path, and of an oracle that chooses
        among the candidates; and the attention that each layer's rows pay to their block.

    Raises:
        ValueError: if no answer is longer than a block.
    """
    target, length = bind(model), drafter.block_size - 1
    parts, shares = [], []
    for number, (prompt, answer) in enumerate(texts, start=1):
        if len(answer) <= length:
            continue
        progress(f"recall, text {number} of {len(texts)}")
        tokens = [*prompt, *answer]
        replay = Replay(target, tokens, len(prompt), drafter.target_layer_ids)
        parts.append(measure(drafter, replay, replay.anchors(length, stride)))
        shares.append(attention_share(drafter, replay, len(prompt) + len(answer) // 2))
    if not parts:
        raise ValueError(
            f"Recall needs answers of more than {length} tokens; give a larger --max-tokens."
        )
    forced = Forced.joined(parts)
    return _table(drafter, forced) | {"attention_share": np.mean(shares, axis=0).tolist()}


def _table(drafter: Drafter, forced: Forced) -> dict[str, Any]:
    chosen = [
        float(column[among].mean()) if among.any() else None
        for column, among in zip(forced.chosen.T, forced.among.T, strict=True)
    ]
    return {
        "anchors": len(forced.best),
        "candidates": drafter.args.selector_top_k or CANDIDATES,
        "recall_best": recall(forced.best),
        "recall_candidates": recall(forced.among),
        "selector_accuracy": chosen if drafter.args.has_selector else None,
        "acceptance_best": acceptance_length(forced.best),
        "acceptance_path": acceptance_length(forced.path),
        "acceptance_oracle": acceptance_length(forced.among),
    }


def attention_share(drafter: Drafter, replay: Replay, anchor: int) -> np.ndarray:
    """How much of each row's attention goes to its own block, mean over heads.

    Args:
        drafter (Drafter): The drafter.
        replay (Replay): The text.
        anchor (int): Position of the block's first row.

    Returns:
        np.ndarray: [layers, block size], each from 0 to 1; the rest goes to the context.
    """
    context = drafter.make_context()
    size = drafter.context_size
    first = 0 if size is None else max(0, anchor - size)
    taps = replay.taps(drafter.target_layer_ids)[:, first:anchor]
    drafter.extend(context, replay.tokens[first:anchor], taps, first)
    masks = mx.full((drafter.block_size - 1,), drafter.args.mask_token_id, mx.uint32)
    block = mx.concatenate([replay.tokens[anchor : anchor + 1], masks])[None]
    x = replay.target.embed(block).astype(mx.float32) * drafter.args.input_embedding_scale
    norms = [*(layer.input_layernorm for layer in drafter.layers), drafter.norm]
    h, shares = norms[0](x).astype(drafter.dtype), []
    for index, layer in enumerate(drafter.layers):
        attention, rows = layer.self_attn, context.layers[index]
        mask = context.mask(index, block.shape[1], attention.window, attention.causal)
        shares.append(_layer_share(layer, h, rows, context.offset, mask))
        x, h = layer(x, h, rows, context.offset, mask, norms[index + 1])
    return np.array(mx.stack(shares))


def _layer_share(
    layer: nn.Module, h: mx.array, rows: LayerContext, position: int, mask: mx.array | None
) -> mx.array:
    attention = layer.self_attn
    if "attention_conv" in layer:
        h, _ = layer.attention_conv.prepare(h)
    B, L, _ = h.shape
    queries = attention.q_norm(attention.q_proj(h).reshape(B, L, attention.n_heads, -1))
    queries = attention.rope(queries.transpose(0, 2, 1, 3), offset=position)
    keys, _ = rows.with_block(*attention.keys_and_values(h, position))
    keys = mx.repeat(keys, attention.n_heads // attention.n_kv_heads, axis=1)
    scores = (queries @ keys.swapaxes(-1, -2)).astype(mx.float32) * attention.scale
    if mask is not None:
        scores = mx.where(mask, scores, -mx.inf)
    weights = mx.softmax(scores, axis=-1)
    return weights[..., -L:].sum(axis=-1).mean(axis=(0, 1))
