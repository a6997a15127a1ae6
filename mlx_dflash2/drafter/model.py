"""The drafter: a small model that fills a whole block of tokens in one parallel pass."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import swiglu
from mlx_lm.models.rope_utils import initialize_rope

from .args import SLIDING, DrafterArgs
from .context import DrafterContext, LayerContext
from .conv import GroupedDynamicConv
from .selector import CandidateSelector


class Proposal(NamedTuple):
    """Draft tokens [L] for the positions after the anchor.

    ``finite`` is a boolean array, false if the drafter's numbers overflowed. Drafts that were
    drawn at random say from what: ``q`` [L, K], float32, over the ids ``candidates`` [L, K].
    ``copied`` drafts are from the text so far, not from a drafter.
    """

    tokens: mx.array
    finite: mx.array
    candidates: mx.array | None = None
    q: mx.array | None = None
    copied: bool = False

    @classmethod
    def none(cls) -> "Proposal":
        """No drafts: a plain step."""
        return cls(mx.array([], mx.uint32), mx.array(True))

    def first(self, count: int) -> "Proposal":
        """The same for the first ``count`` drafts."""
        return self._of_rows(slice(count))

    def only(self, index: int) -> "Proposal":
        """The same for one draft, or for none behind the last."""
        return self._of_rows(slice(index, index + 1))

    def _of_rows(self, at: slice) -> "Proposal":
        candidates, q = (None if x is None else x[at] for x in (self.candidates, self.q))
        return self._replace(tokens=self.tokens[at], candidates=candidates, q=q)


class Proposer(Protocol):
    """What the decoding loop asks of a drafter; anything that offers this can draft.

    ``context_size`` is how many of the latest committed rows it can use, ``None`` for all. A
    context with a method ``read(tokens, position)`` is shown the ids of all committed tokens, as
    a list of integers, those of earlier rows included.
    """

    block_size: int
    target_layer_ids: Sequence[int]
    context_size: int | None

    def make_context(self) -> Any:
        """A fresh context for one sequence."""

    def extend(self, context: Any, tokens: mx.array, taps: mx.array | None, position: int):
        """Take in committed tokens [S] and their taps [1, S, T * H], from an absolute position."""

    def propose(
        self,
        target: Any,
        anchor: mx.array,
        context: Any,
        block_size: int,
        temperature: float = 0.0,
        key: mx.array | None = None,
    ) -> Proposal:
        """Draft ``block_size - 1`` tokens to follow the anchor, an id of shape [1].

        Above temperature 0 a drafter may draw with ``key``, and then gives its ``q``; drafts
        without one count as certain.
        """


class DraftAttention(nn.Module):
    def __init__(self, args: DrafterArgs, layer_idx: int):
        super().__init__()
        dim, head_dim = args.hidden_size, args.head_dim
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

    def keys_and_values(self, x: mx.array, position: int) -> tuple[mx.array, mx.array]:
        B, L, _ = x.shape
        keys = self.k_norm(self.k_proj(x).reshape(B, L, self.n_kv_heads, -1))
        values = self.v_proj(x).reshape(B, L, self.n_kv_heads, -1)
        keys, values = keys.transpose(0, 2, 1, 3), values.transpose(0, 2, 1, 3)
        return self.rope(keys, offset=position), values

    def __call__(
        self, x: mx.array, context: LayerContext, position: int, mask: mx.array | None
    ) -> mx.array:
        B, L, _ = x.shape
        queries = self.q_norm(self.q_proj(x).reshape(B, L, self.n_heads, -1))
        queries = self.rope(queries.transpose(0, 2, 1, 3), offset=position)
        keys, values = self.keys_and_values(x, position)
        output = context.attend(queries, keys, values, self.scale, mask)
        return self.o_proj(output.transpose(0, 2, 1, 3).reshape(B, L, -1))


class DraftMLP(nn.Module):
    def __init__(self, args: DrafterArgs):
        super().__init__()
        self.gate_proj = nn.Linear(args.hidden_size, args.intermediate_size, bias=False)
        self.up_proj = nn.Linear(args.hidden_size, args.intermediate_size, bias=False)
        self.down_proj = nn.Linear(args.intermediate_size, args.hidden_size, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class DraftLayer(nn.Module):
    def __init__(self, args: DrafterArgs, layer_idx: int):
        super().__init__()
        self.self_attn = DraftAttention(args, layer_idx)
        self.mlp = DraftMLP(args)
        self.input_layernorm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        if args.has_conv:
            self.attention_conv = GroupedDynamicConv(args)
            self.mlp_conv = GroupedDynamicConv(args)

    def __call__(
        self,
        x: mx.array,
        h: mx.array,
        context: LayerContext,
        position: int,
        mask: mx.array | None,
        next_norm: nn.RMSNorm,
    ) -> tuple[mx.array, mx.array]:
        """Run the layer on a residual stream ``x`` and the input norm's rows of it, ``h``.

        The residual stream grows past what 16 bits resolve: it stays float32, while the sublayers
        compute in the dtype of the weights.

        Returns:
            tuple of mx.array: The new stream, and what ``next_norm`` makes of it.
        """
        norm = self.post_attention_layernorm
        if "attention_conv" in self:
            h, kernel = self.attention_conv.prepare(h)
            h = self.self_attn(h, context, position, mask)
            x, h = self.attention_conv.finish(h, kernel, x, norm)
            h, kernel = self.mlp_conv.prepare(h)
            return self.mlp_conv.finish(self.mlp(h), kernel, x, next_norm)
        x = x + self.self_attn(h, context, position, mask)
        x = x + self.mlp(norm(x).astype(h.dtype))
        return x, next_norm(x).astype(h.dtype)


class Drafter(nn.Module):
    """A DFlash 1 or DFlash 2 drafter; it borrows embedding and head from its target."""

    def __init__(self, args: DrafterArgs):
        super().__init__()
        self.args = args
        taps = len(args.target_layer_ids) * args.target_hidden_size
        self.fc = nn.Linear(taps, args.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.layers = [DraftLayer(args, i) for i in range(args.num_hidden_layers)]
        self.norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        if args.has_selector:
            self.candidate_selector = CandidateSelector(args)

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

    def extend(self, context: DrafterContext, tokens: mx.array, taps: mx.array, position: int):
        """Add committed rows to the context.

        Args:
            context (DrafterContext): From :meth:`make_context`; changed in place.
            tokens (mx.array): Ids [S] of the rows; the drafter reads only their taps.
            taps (mx.array): [B, S, T * H], the tapped layers' outputs in list order.
            position (int): Absolute position of the first row.
        """
        context.append(self.context_rows(taps, position), position)

    def context_rows(
        self, taps: mx.array, position: int | mx.array
    ) -> list[tuple[mx.array, mx.array]]:
        """Each layer's keys and values of committed rows [B, S, T * H].

        ``position`` is that of the first row, or an array [B] of them.
        """
        features = self.hidden_norm(self.fc(taps.astype(self.dtype)))
        return [layer.self_attn.keys_and_values(features, position) for layer in self.layers]

    def __call__(self, embeddings: mx.array, context: DrafterContext) -> mx.array:
        """Run a block.

        Args:
            embeddings (mx.array): Embedded anchor and masks, [B, L, H].
            context (DrafterContext): The committed rows; not changed.

        Returns:
            mx.array: Rows 1 to L - 1 after the final norm, [B, L - 1, H].
        """
        x, scale = embeddings.astype(mx.float32), self.args.input_embedding_scale
        x = x if scale == 1 else x * scale
        first, *others = (layer.input_layernorm for layer in self.layers)
        h = first(x).astype(self.dtype)
        for index, next_norm in enumerate([*others, self.norm]):
            layer, layer_context = self.layers[index], context.layers[index]
            attention = layer.self_attn
            mask = context.mask(index, x.shape[1], attention.window, attention.causal)
            x, h = layer(x, h, layer_context, context.offset, mask, next_norm)
        return h[:, 1:]

    def propose(
        self,
        target: Any,
        anchor: mx.array,
        context: DrafterContext,
        block_size: int,
        temperature: float = 0.0,
        key: mx.array | None = None,
        on_block: Callable[[mx.array, mx.array], None] | None = None,
    ) -> Proposal:
        """Draft the tokens after the anchor; see :class:`Proposer` and :meth:`propose_rows`."""
        keys = None if key is None else [key]
        return self.propose_rows(target, anchor, context, block_size, temperature, keys, on_block)[
            0
        ]

    def propose_rows(
        self,
        target: Any,
        anchors: mx.array,
        context: DrafterContext,
        block_size: int,
        temperature: float = 0.0,
        keys: Sequence[mx.array] | None = None,
        on_block: Callable[[mx.array, mx.array], None] | None = None,
    ) -> list[Proposal]:
        """Draft a block after each of several anchors [B] in one pass; a key for each.

        ``on_block`` is called with hidden rows and logits before a path is chosen.
        """
        hidden, logits = self.run_block(target, anchors, context, block_size)
        if on_block is not None:
            on_block(hidden, logits)
        if target.vocab_size > self.args.vocab_size:
            # A padding id of the target has no row in the codebooks.
            anchors = mx.minimum(anchors, self.args.vocab_size - 1)
        return self.choose(anchors, hidden, logits, temperature, keys)

    def run_block(
        self, target: Any, anchors: mx.array, context: DrafterContext, block_size: int
    ) -> tuple[mx.array, mx.array]:
        """Rows 1 to L - 1 of the blocks after anchors [B]: hidden [B, L - 1, H] and logits.

        The logits [B, L - 1, V] are raw and of the ids that may be drafted only.
        """
        masks = mx.full((anchors.size, block_size - 1), self.args.mask_token_id, anchors.dtype)
        block = mx.concatenate([anchors[:, None], masks], axis=1)
        hidden = self(target.embed(block), context)
        return hidden, self.head(target, hidden)

    def head(self, target: Any, hidden: mx.array) -> mx.array:
        """Raw logits of hidden rows, of the ids that may be drafted."""
        limits = (target.vocab_size, self.args.vocab_size, self.args.selector_vocab_size)
        return target.head(hidden)[..., : min(limit for limit in limits if limit)]

    def choose(
        self,
        anchors: mx.array,
        hidden: mx.array,
        logits: mx.array,
        temperature: float = 0.0,
        keys: Sequence[mx.array] | None = None,
    ) -> list[Proposal]:
        """Draft tokens from the rows of :meth:`run_block`, for each anchor."""
        B, L, _ = hidden.shape
        if self.args.has_selector:
            uniforms = None
            if temperature > 0:
                uniforms = mx.stack([mx.random.uniform(shape=(L,), key=key) for key in keys])
            path = self.candidate_selector(anchors, hidden, logits, temperature, uniforms)
            drawn = (path.candidates, path.q) if temperature > 0 else ([None] * B,) * 2
            finite = _all_finite(path.unary.flatten(1))
            return [Proposal(*row) for row in zip(path.tokens, finite, *drawn, strict=True)]
        # Without a selector independent draws would not form a text: the best tokens do better.
        tokens = mx.argmax(logits, axis=-1)
        finite = _all_finite(mx.max(logits, axis=-1))
        return [Proposal(*row) for row in zip(tokens, finite, strict=True)]

    def sanitize(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Rename the accepted spellings of a checkpoint to the names of this module."""
        renamed = {}
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
    """Whether a row has no infinity or NaN, in the fewest launches: a NaN is not below infinity."""
    return mx.abs(x).max(axis=-1) < float("inf")


_SPELLINGS = {
    "encoder.fc.": "fc.",
    "encoder.output_norm_enc.": "hidden_norm.",
    "midlayer.": "layers.0.",
}
