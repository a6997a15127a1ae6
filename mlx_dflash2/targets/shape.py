"""What a drafter depends on in its target."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TargetShape:
    """What of a target a drafter depends on; ``vocab_size`` counts padding rows."""

    hidden_size: int
    vocab_size: int
    num_layers: int

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "TargetShape":
        """Read the shape from a target's config.json, also where the text model is nested.

        Raises:
            ValueError: naming the field that is missing or no positive integer.
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


def _is_positive_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**31
