"""What a drafter needs of its target."""

from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx


@dataclass(frozen=True)
class TargetShape:
    """The sizes that a drafter depends on; ``vocab_size`` counts padding rows."""

    hidden_size: int
    vocab_size: int
    num_layers: int

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "TargetShape":
        """Read the shape from a target's config.json, also where the text model is nested.

        Raises:
            ValueError: naming the field that is missing or not a positive integer.
        """
        nested = config.get("text_config") or {}
        if not isinstance(nested, dict):
            raise ValueError(f"Target config: `text_config` is {nested!r} but has to be an object.")
        text = config | {name: value for name, value in nested.items() if value is not None}
        names = ("hidden_size", "vocab_size", "num_hidden_layers")
        for name in names:
            if not _is_positive_integer(text.get(name)):
                found = text.get(name)
                raise ValueError(f"Target config: `{name}` is {found!r} but has to be 1 or more.")
        return cls(*(text[name] for name in names))


class TargetHead(Protocol):
    """The two ends of a target, which its drafter borrows."""

    @property
    def vocab_size(self) -> int:
        """Rows of the head, padding included."""

    def embed(self, tokens: mx.array) -> mx.array:
        """Embed token ids [B, L] as drafters were trained on them: [B, L, H]."""

    def head(self, hidden: mx.array) -> mx.array:
        """Compute raw logits [..., V] of the drafter's rows [..., H]."""


def _is_positive_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**31
