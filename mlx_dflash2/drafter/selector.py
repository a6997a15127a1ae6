"""The path selector of DFlash 2: candidates, pair scores, and the walk through them."""

from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..kernels import pair_walk, top_k
from .args import DrafterArgs


class Path(NamedTuple):
    """One candidate chosen a position.

    ``tokens`` [B, L]; ``candidates`` [B, L, K] ids, best first; ``unary`` [B, L, K] their
    transformed logits, float32; ``q`` [B, L, K] what each step drew from, float32.
    """

    tokens: mx.array
    candidates: mx.array
    unary: mx.array
    q: mx.array


class CandidateSelector(nn.Module):
    """Scores every pair of adjacent candidates at once and walks the best path from the anchor."""

    def __init__(self, args: DrafterArgs):
        super().__init__()
        self.top_k = args.selector_top_k
        self.multiplier = args.output_multiplier
        self.softcap = args.final_logit_softcapping
        self.predecessor_codebook = nn.Embedding(args.vocab_size, args.selector_rank)
        self.successor_codebook = nn.Embedding(args.vocab_size, args.selector_rank)
        self.hidden_projection = nn.Linear(args.hidden_size, args.selector_rank, bias=False)

    def __call__(
        self,
        anchor: mx.array,
        hidden: mx.array,
        logits: mx.array,
        temperature: float = 0.0,
        uniforms: mx.array | None = None,
    ) -> Path:
        """Choose a path.

        Args:
            anchor (mx.array): Token ids [B].
            hidden (mx.array): Rows [B, L, H] after the final norm.
            logits (mx.array): [B, L, V] of the head, raw; V is at most the codebooks' rows.
            temperature (float): 0 takes the best step. Default: ``0.0``.
            uniforms (mx.array, optional): [B, L], for a temperature above 0.
        """
        unary, candidates = top_k(logits, self.top_k, self.multiplier, self.softcap)
        gate = self.hidden_projection(hidden)
        tables = self.predecessor_codebook, self.successor_codebook
        if not isinstance(tables[0], nn.QuantizedEmbedding):
            tables = [table.weight for table in tables]
            chain = anchor, candidates, unary, gate, *tables
            tokens, _, q = pair_walk(*chain, temperature, uniforms)
            return Path(tokens, candidates, unary, q)
        # Unpack only the rows in use, and address them by their place.
        ids = mx.concatenate([anchor[:, None], candidates.flatten(1)], axis=1)
        tables = [table(ids.flatten()) for table in tables]
        places = mx.arange(ids.size, dtype=mx.uint32).reshape(ids.shape)
        chain = places[:, 0], places[:, 1:].reshape(candidates.shape), unary, gate, *tables
        _, choices, q = pair_walk(*chain, temperature, uniforms)
        tokens = mx.take_along_axis(candidates, choices[..., None], axis=-1)[..., 0]
        return Path(tokens, candidates, unary, q)
