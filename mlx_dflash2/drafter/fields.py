"""Typed reading of a drafter's config.json; an error names what is wrong in one line."""

from typing import Any, NoReturn

LARGEST_ID = 2**31 - 1


def refuse(name: str, found: Any, allowed: str) -> NoReturn:
    """Raise the ValueError that names a field, the value found and the values allowed."""
    shown = "missing" if found is None else repr(found)
    shown = shown if len(shown) <= 200 else f"{shown[:200]}…"
    raise ValueError(f"Drafter config: `{name}` is {shown} but has to be {allowed}.")


def is_integer(value: Any, low: int, high: int = LARGEST_ID) -> bool:
    """Tell whether a JSON value is an integer in a range; ``true`` is not."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def is_number(value: Any, low: float = -1e300, high: float = 1e300) -> bool:
    """Tell whether a JSON value is a number in a range; NaN and ``true`` are not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def is_positive(value: Any) -> bool:
    return is_number(value) and value > 0


def section(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Return an object of a config; empty where it is absent or null."""
    value = config.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        refuse(name, value, "an object")
    return value


def architectures(config: dict[str, Any]) -> list[str]:
    """Return the config's ``architectures``, which some write as one string."""
    value = config.get("architectures")
    if value is None:
        return []
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        refuse("architectures", value, "a list of names")
    return names


class Fields:
    """The fields of a config: of ``dflash_config``, else of the top level; null is absent.

    Every reader returns its default for an absent field.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.top, self.nested = config, section(config, "dflash_config")

    def get(self, name: str, default: Any = None) -> Any:
        for level in (self.nested, self.top):
            if level.get(name) is not None:
                return level[name]
        return default

    def first(self, *names: str) -> tuple[str, Any]:
        """Return name and value of the first field that is there; a name may be nested once."""
        for name in names:
            level = self.nested if name.startswith("dflash_config.") else self.top
            value = level.get(name.removeprefix("dflash_config."))
            if value is not None:
                return name, value
        return names[0], None

    def required(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            refuse(name, None, "given")
        return value

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> Any:
        value = self.get(name, default)
        if value is not None and not is_integer(value, low, high):
            refuse(name, value, f"an integer from {low} to {high}")
        return value

    def positive(self, name: str, default: float | None = None) -> Any:
        value = self.get(name, default)
        if value is not None and not is_positive(value):
            refuse(name, value, "a number above 0")
        return None if value is None else float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            refuse(name, value, "true or false")
        return value
