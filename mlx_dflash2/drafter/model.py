"""The drafter: a small model that fills a whole block of tokens in one parallel pass."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import swiglu
from mlx_lm.models.rope_utils import initialize_rope

from ..targets.shape import TargetHead
from .args import SLIDING, DrafterArgs
from .context import BlockRows, Context, DrafterContext, KeysAndValues
from .conv import GroupedDynamicConv
from .logits import Process, draft_logits, transform
from .proposal import Proposal, Proposer
from .selector import CandidateSelector
from .vocabulary import FrequentHead, FrequentTokens

__all__ = ["Drafter", "Proposal", "Proposer"]


class DraftAttention(nn.Module):
    def __init__(self, args: DrafterArgs, layer_idx: int) -> None:
        super().__init__()
        dim, head_dim = args.hidden_size, args.head_dim
        self.layer_idx = layer_idx
        self.n_heads, self.n_kv_heads = args.num_attention_heads, args.num_key_value_heads
        self.scale = head_dim**-0.5
        sliding = args.layer_types[layer_idx] == SLIDING
        self.window = args.sliding_window if sliding else None
        self.causal = args.causal[layer_idx]

        self.q_proj = nn.Linear(dim, self.n_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(dim, self.n_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(dim, self.n_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(self.n_heads * head_dim, dim, bias=False)
        self.q_norm = nn.RMSNorm(head_dim, eps=args.rms_norm_eps)
        self.k_norm = nn.RMSNorm(head_dim, eps=args.rms_norm_eps)
        self.rope = initialize_rope(
            head_dim,
            base=args.rope_parameters[layer_idx]["rope_theta"],
            traditional=args.rope_traditional,
            scaling_config=args.rope_parameters[layer_idx],
            max_position_embeddings=args.max_position_embeddings,
        )

    def keys_and_values(self, x: mx.array, position: int | mx.array) -> KeysAndValues:
        """Compute keys and values of rows [B, L, H] that begin at a position, or at [B] of them."""
        B, L, _ = x.shape
        keys = self.k_norm(self.k_proj(x).reshape(B, L, self.n_kv_heads, -1))
        values = self.v_proj(x).reshape(B, L, self.n_kv_heads, -1)
        keys, values = keys.transpose(0, 2, 1, 3), values.transpose(0, 2, 1, 3)
        return self.rope(keys, offset=position), values

    def __call__(self, x: mx.array, context: Context) -> mx.array:
        B, L, _ = x.shape
        queries = self.q_norm(self.q_proj(x).reshape(B, L, self.n_heads, -1))
        queries = self.rope(queries.transpose(0, 2, 1, 3), offset=context.offset)
        keys, values = self.keys_and_values(x, context.offset)
        rows = BlockRows(queries, keys, values, self.scale, self.window, self.causal)
        output = context.attend(self.layer_idx, rows)
        return self.o_proj(output.transpose(0, 2, 1, 3).reshape(B, L, -1))


class DraftMLP(nn.Module):
    def __init__(self, args: DrafterArgs) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(args.hidden_size, args.intermediate_size, bias=False)
        self.up_proj = nn.Linear(args.hidden_size, args.intermediate_size, bias=False)
        self.down_proj = nn.Linear(args.intermediate_size, args.hidden_size, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class DraftLayer(nn.Module):
    def __init__(self, args: DrafterArgs, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = DraftAttention(args, layer_idx)
        self.mlp = DraftMLP(args)
        self.input_layernorm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        if args.has_conv:
            self.attention_conv = GroupedDynamicConv(args)
            self.mlp_conv = GroupedDynamicConv(args)

    def __call__(
        self, x: mx.array, h: mx.array, context: Context, next_norm: nn.RMSNorm
    ) -> tuple[mx.array, mx.array]:
        """Run the layer.

        The residual stream grows past what 16 bits resolve: it stays float32, while the sublayers
        compute in the dtype of the weights.

        Args:
            x (mx.array): The residual stream, [B, L, H] float32.
            h (mx.array): Its rows after the layer's input norm, [B, L, H].
            context (Context): The committed rows.
            next_norm (nn.RMSNorm): The input norm of the next layer, or the final one.

        Returns:
            tuple of mx.array: The new stream, and its rows after ``next_norm``.
        """
        norm = self.post_attention_layernorm
        if "attention_conv" in self:
            h, kernel = self.attention_conv.prepare(h)
            h = self.self_attn(h, context)
            x, h = self.attention_conv.finish(h, kernel, x, norm)
            h, kernel = self.mlp_conv.prepare(h)
            return self.mlp_conv.finish(self.mlp(h), kernel, x, next_norm)
        x = x + self.self_attn(h, context)
        x = x + self.mlp(norm(x).astype(h.dtype))
        return x, next_norm(x).astype(h.dtype)


class Drafter(nn.Module):
    """A DFlash 1 or DFlash 2 drafter; it borrows embedding and head from its target."""

    def __init__(self, args: DrafterArgs) -> None:
        super().__init__()
        self.args = args
        taps = len(args.target_layer_ids) * args.target_hidden_size
        self.fc = nn.Linear(taps, args.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.layers = [DraftLayer(args, i) for i in range(args.num_hidden_layers)]
        self.norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        if args.has_selector:
            self.candidate_selector = CandidateSelector(args)
        self.frequent_tokens: FrequentTokens | None = None

    @property
    def block_size(self) -> int:
        return self.args.block_size

    @property
    def target_layer_ids(self) -> list[int]:
        return self.args.target_layer_ids

    @property
    def context_size(self) -> int | None:
        return self.args.context_size

    @property
    def dtype(self) -> mx.Dtype:
        return self.hidden_norm.weight.dtype

    def make_context(self) -> DrafterContext:
        windows = (layer.self_attn.window for layer in self.layers)
        return DrafterContext([window and window - 1 for window in windows])

    def extend(
        self, context: DrafterContext, tokens: mx.array, taps: mx.array | None, position: int
    ) -> None:
        """Add committed rows to the context.

        Args:
            context (DrafterContext): From :meth:`make_context`; changed in place.
            tokens (mx.array): Ids [S] of the rows; the drafter reads only their taps.
            taps (mx.array): [B, S, T * H], the tapped layers' outputs in list order.
            position (int): Absolute position of the first row.

        Raises:
            ValueError: if the taps are missing.
        """
        if taps is None:
            raise ValueError(
                f"`taps` is None but has to hold the outputs of layers {self.target_layer_ids}."
            )
        context.append(self.context_rows(taps, position), position)

    def context_rows(self, taps: mx.array, position: int | mx.array) -> list[KeysAndValues]:
        """Compute each layer's keys and values of committed rows [B, S, T * H].

        ``position`` is that of the first row, or an array [B] of them.
        """
        features = self.hidden_norm(self.fc(taps.astype(self.dtype)))
        return [layer.self_attn.keys_and_values(features, position) for layer in self.layers]

    def __call__(self, embeddings: mx.array, context: Context) -> mx.array:
        """Run a block.

        Args:
            embeddings (mx.array): Embedded anchor and masks, [B, L, H].
            context (Context): The committed rows; not changed.

        Returns:
            mx.array: Rows 1 to L - 1 after the final norm, [B, L - 1, H].
        """
        x, scale = embeddings.astype(mx.float32), self.args.input_embedding_scale
        x = x if scale == 1 else x * scale
        first, *others = (layer.input_layernorm for layer in self.layers)
        h = first(x).astype(self.dtype)
        for layer, next_norm in zip(self.layers, [*others, self.norm], strict=True):
            x, h = layer(x, h, context, next_norm)
        return h[:, 1:]

    def propose(
        self,
        target: TargetHead,
        anchor: mx.array,
        context: Context,
        block_size: int,
        temperature: float = 0.0,
        key: mx.array | None = None,
        on_block: Callable[[mx.array, mx.array], None] | None = None,
        process: Process | None = None,
    ) -> Proposal:
        """Draft the tokens after the anchor; see :class:`Proposer` and :meth:`propose_rows`."""
        options = block_size, temperature, [key], on_block, process
        return self.propose_rows(target, anchor, context, *options)[0]

    def propose_rows(
        self,
        target: TargetHead,
        anchors: mx.array,
        context: Context,
        block_size: int,
        temperature: float = 0.0,
        keys: Sequence[mx.array | None] = (),
        on_block: Callable[[mx.array, mx.array], None] | None = None,
        process: Process | None = None,
    ) -> list[Proposal]:
        """Draft a block after each of several anchors [B] in one pass; a key for each.

        ``on_block`` is called with hidden rows and logits before a path is chosen; ``process``
        is that of :meth:`choose`.
        """
        hidden, logits = self.run_block(target, anchors, context, block_size)
        if on_block is not None:
            on_block(hidden, logits)
        ids = target.draft_ids if isinstance(target, FrequentHead) else None
        return self.choose(anchors, hidden, logits, temperature, keys, process, ids)

    def run_block(
        self, target: TargetHead, anchors: mx.array, context: Context, block_size: int
    ) -> tuple[mx.array, mx.array]:
        """Run :meth:`hidden_rows` and the head.

        Returns:
            tuple of mx.array: Hidden rows [B, L - 1, H], and their raw logits [B, L - 1, V] of the
            ids that may be drafted.
        """
        hidden = self.hidden_rows(target, anchors, context, block_size)
        return hidden, self.head(target, hidden)

    def hidden_rows(
        self, target: TargetHead, anchors: mx.array, context: Context, block_size: int
    ) -> mx.array:
        """Fill the blocks of L rows after anchors [B]: rows 1 to L - 1, [B, L - 1, H]."""
        masks = mx.full((anchors.size, block_size - 1), self.args.mask_token_id, anchors.dtype)
        block = mx.concatenate([anchors[:, None], masks], axis=1)
        return self(target.embed(block), context)

    def head(self, target: TargetHead, hidden: mx.array) -> mx.array:
        """Compute raw logits of hidden rows, of the ids that may be drafted."""
        return draft_logits(target, hidden, self.args)

    def choose(
        self,
        anchors: mx.array,
        hidden: mx.array,
        logits: mx.array,
        temperature: float = 0.0,
        keys: Sequence[mx.array | None] = (),
        process: Process | None = None,
        ids: mx.array | None = None,
    ) -> list[Proposal]:
        """Choose draft tokens from the rows of :meth:`run_block`, for each anchor.

        ``process`` changes transformed logits [B, L - 1, V] before the best are found; ``ids`` [V]
        are those of the columns, by default their numbers.
        """
        B, L, _ = hidden.shape
        if self.args.has_selector:
            uniforms = None
            if temperature > 0:
                uniforms = mx.stack([mx.random.uniform(shape=(L,), key=key) for key in keys])
            options = temperature, uniforms, process, ids
            path = self.candidate_selector(anchors, hidden, logits, *options)
            drawn = (path.candidates, path.q) if temperature > 0 else ([None] * B,) * 2
            finite = _all_finite(path.unary.flatten(1))
            if process is not None:
                # Processed numbers are cut: there an infinite one does not show.
                finite = finite & _all_finite(mx.max(logits, axis=-1))
            return [Proposal(*row) for row in zip(path.tokens, finite, *drawn, strict=True)]
        # Without a selector independent draws would not form a text: the best tokens do better.
        finite = _all_finite(mx.max(logits, axis=-1))
        if process is not None:
            logits = process(transform(logits, self.args))
        tokens = mx.argmax(logits, axis=-1)
        tokens = tokens if ids is None else ids[tokens]
        return [Proposal(*row) for row in zip(tokens, finite, strict=True)]

    def sanitize(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Rename the accepted spellings of a checkpoint to the names of this module."""
        renamed: dict[str, Any] = {}
        for name, value in weights.items():
            name = name.removeprefix("model.")
            for old, new in _SPELLINGS.items():
                if name.startswith(old):
                    name = new + name.removeprefix(old)
            if name.endswith("_codebook"):
                name += ".weight"
            if name in renamed:
                raise ValueError(f"The drafter's weights hold `{name}` under two spellings.")
            renamed[name] = value
        return renamed


def _all_finite(x: mx.array) -> mx.array:
    """Tell for each row whether it has neither infinity nor NaN, in the fewest launches."""
    # A NaN is not below infinity.
    return mx.abs(x).max(axis=-1) < float("inf")


_SPELLINGS = {
    "encoder.fc.": "fc.",
    "encoder.output_norm_enc.": "hidden_norm.",
    "midlayer.": "layers.0.",
}
