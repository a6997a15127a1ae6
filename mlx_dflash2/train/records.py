"""JSON records beside what was made: they say what decided it, so that nothing else is mixed in."""

import json
import os
from pathlib import Path
from typing import Any


def refuse_difference(
    source: str | Path, found: dict[str, Any], wanted: dict[str, Any], advice: str
) -> None:
    """Refuse to continue ``source`` if its record ``found`` differs in a wanted field.

    Raises:
        ValueError: naming the first field that differs, both values, and what to do about it.
    """
    for name, value in wanted.items():
        if found.get(name) != value:
            raise ValueError(
                f"`{name}` is {value!r} but {source} was made with {found.get(name)!r}; {advice}."
            )


def read_record(file: Path) -> dict[str, Any]:
    """Read a record, or raise a ``ValueError`` if the file is not one."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}.") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} is not a record: it does not hold an object.")
    return found


def write_record(file: Path, record: dict[str, Any]) -> None:
    """Write a record, whole or not at all; several processes may do so at once."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(f".partial-{os.getpid()}")
    partial.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    partial.replace(file)
