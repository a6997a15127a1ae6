"""What a drafter needs of its target."""

from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx


@dataclass(frozen=True)
class TargetShape:
    """The sizes that a drafter depends on; ``vocab_size`` counts padding rows."""

    hidden_size: int
    vocab_size: int
    num_layers: int


class TargetHead(Protocol):
    """The two ends of a target, which its drafter borrows."""

    @property
    def vocab_size(self) -> int:
        """Rows of the head, padding included."""

    def embed(self, tokens: mx.array) -> mx.array:
        """Embed token ids [B, L] as drafters were trained on them: [B, L, H]."""

    def head(self, hidden: mx.array) -> mx.array:
        """Compute raw logits [..., V] of the drafter's rows [..., H]."""
