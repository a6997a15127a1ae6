"""The path selector of DFlash 2: candidates, pair scores, and the walk through them."""

from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..kernels import pair_score, pair_walk
from ..kernels.pair_score import PairInputs
from .args import DrafterArgs
from .logits import Process, best_tokens


class Path(NamedTuple):
    """One candidate chosen for each position.

    Attributes:
        tokens (mx.array): The chosen ids, [B, L].
        candidates (mx.array): Ids [B, L, K], best first.
        unary (mx.array): The candidates' transformed logits, [B, L, K] float32.
        q (mx.array): The distribution that each step drew from, [B, L, K] float32.
    """

    tokens: mx.array
    candidates: mx.array
    unary: mx.array
    q: mx.array


class CandidateSelector(nn.Module):
    """Scores pairs of adjacent candidates and walks the best path from the anchor.

    A target may have padding ids that the codebooks have no row of; they read the last row.
    """

    def __init__(self, args: DrafterArgs) -> None:
        super().__init__()
        self.args = args
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
        process: Process | None = None,
        ids: mx.array | None = None,
    ) -> Path:
        """Choose a path.

        Args:
            anchor (mx.array): Token ids [B].
            hidden (mx.array): Rows [B, L, H] after the final norm.
            logits (mx.array): [B, L, V] of the head, raw.
            temperature (float): 0 takes the best step. Default: ``0.0``.
            uniforms (mx.array, optional): [B, L] in [0, 1), for a temperature above 0.
            process (callable, optional): As for :func:`best_tokens`.
            ids (mx.array, optional): Of the columns [V], by default their numbers.
        """
        unary, candidates = best_tokens(logits, self.args.selector_top_k, self.args, process)
        candidates = candidates if ids is None else ids[candidates]
        inputs = self.pair_inputs(anchor, hidden, candidates, unary)
        tokens, choices, q = pair_walk(inputs, temperature, uniforms)
        if inputs.candidates is not candidates:
            tokens = mx.take_along_axis(candidates, choices[..., None], axis=-1)[..., 0]
        return Path(tokens, candidates, unary, q)

    def pair_scores(
        self, anchor: mx.array, hidden: mx.array, candidates: mx.array, unary: mx.array
    ) -> mx.array:
        """Score every pair of adjacent candidates.

        Args:
            anchor (mx.array): Token ids [B].
            hidden (mx.array): Rows [B, L, H] after the final norm.
            candidates (mx.array): Token ids [B, L, K].
            unary (mx.array): Their transformed logits, [B, L, K].

        Returns:
            mx.array: [B, L, K, K] float32, indexed [batch, position, predecessor, candidate].
        """
        return pair_score(self.pair_inputs(anchor, hidden, candidates, unary))

    def pair_inputs(
        self, anchor: mx.array, hidden: mx.array, candidates: mx.array, unary: mx.array
    ) -> PairInputs:
        """Prepare :meth:`pair_scores` for a kernel.

        Codebooks that are not plain tables are computed for the ids in use; the ids then are
        places in what was computed.
        """
        gate = self.hidden_projection(hidden)
        before, after = self.predecessor_codebook, self.successor_codebook
        if isinstance(before, nn.Embedding) and isinstance(after, nn.Embedding):
            return PairInputs(anchor, candidates, unary, gate, before.weight, after.weight)
        ids = mx.concatenate([anchor[:, None], candidates.flatten(1)], axis=1)
        places = mx.arange(ids.size, dtype=mx.uint32).reshape(ids.shape)
        ids, later = ids.flatten(), places[:, 1:].reshape(candidates.shape)
        tables = self.predecessors(ids), self.successors(ids)
        return PairInputs(places[:, 0], later, unary, gate, *tables)

    def predecessors(self, ids: mx.array) -> mx.array:
        """Look up rows [..., R] of the predecessor codebook."""
        return self.predecessor_codebook(mx.minimum(ids, self.args.vocab_size - 1))

    def successors(self, ids: mx.array) -> mx.array:
        """Look up rows [..., R] of the successor codebook."""
        return self.successor_codebook(mx.minimum(ids, self.args.vocab_size - 1))
