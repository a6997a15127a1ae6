"""Options of a command as a table: their kinds, defaults, ranges and help."""

import argparse
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple


class Range(NamedTuple):
    """Numbers from ``low`` on, or above it, and below a limit."""

    low: float
    open: bool = False
    below: float = math.inf

    def has(self, value: float) -> bool:
        """Tell whether a number is in the range; NaN is in none."""
        return (self.low < value if self.open else self.low <= value) and value < self.below

    def __str__(self) -> str:
        low = f"above {self.low:g}" if self.open else f"{self.low:g} or more"
        return low if self.below == math.inf else f"{low} and below {self.below:g}"


class Option(NamedTuple):
    """One option.

    Attributes:
        name: Its name in the namespace; the flag has hyphens for underscores.
        kind: A type, a tuple of choices, or a list of one of these for several values; ``bool``
            is a flag without a value.
        default: Also told in the help, if it is a number or text.
        allowed: The range that :func:`check_ranges` checks.
        help: The help text.
        short: Another flag, such as ``-m``.
    """

    name: str
    kind: Any
    default: Any
    allowed: Range | None
    help: str
    short: str | None = None


def flag(name: str) -> str:
    """Return the flag of an option by its name."""
    return f"--{name.replace('_', '-')}"


def add_options(parser: argparse._ActionsContainer, options: Iterable[Option]) -> None:
    """Add options to a parser or to a group of one."""
    for name, kind, default, _, text, short in options:
        how: dict[str, Any] = {}
        if isinstance(kind, list):
            how, kind = {"nargs": "+"}, kind[0]
        if kind is bool:
            how = {"action": "store_true"}
        elif isinstance(kind, tuple):
            how |= {"type": type(kind[0]), "choices": kind}
        else:
            how |= {"type": kind}
        if default not in (None, []) and default is not False and "(default" not in text:
            shown = " ".join(map(str, default)) if isinstance(default, list) else default
            text += f" (default: {shown})"
        flags = [flag(name)] if short is None else [flag(name), short]
        parser.add_argument(*flags, default=default, help=text, **how)


def check_ranges(
    args: argparse.Namespace, options: Iterable[Option], spell: Callable[[str], str] = flag
) -> None:
    """Check that numbers are within their options' ranges.

    Args:
        args (argparse.Namespace): The options' values; ``None`` is in every range.
        options (iterable of Option): What to check.
        spell (callable): How an error calls an option. Default: by its flag.

    Raises:
        ValueError: naming the option, its value and what is allowed.
    """
    for name, _, _, allowed, *_ in options:
        value = getattr(args, name)
        for number in value if isinstance(value, list) else [value]:
            if allowed and number is not None and not allowed.has(number):
                raise ValueError(f"{spell(name)} is {number} but has to be {allowed}.")
