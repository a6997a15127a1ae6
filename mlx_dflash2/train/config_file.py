"""Options from a YAML file, checked as the command line's are."""

import argparse
from pathlib import Path
from typing import Any

import yaml


def read_options(path: Path, options: dict[str, argparse.Action]) -> dict[str, Any]:
    """Options of a config file by name, as the command line would give them.

    Args:
        path (Path): The file.
        options (dict): The parser's actions by name.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: naming the field of it that is not as it has to be.
    """
    if not path.is_file():
        raise FileNotFoundError(f"There is no config file {path}.")
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} is not valid YAML: {reason}.") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no options by name.")
    found = {str(name).replace("-", "_"): value for name, value in found.items()}
    for name in found:
        if name not in options:
            raise ValueError(f"`{name}` in {path} is no option of mlx_dflash2.train.")
    return {name: _from_config(options[name], value, path) for name, value in found.items()}


def _from_config(option: argparse.Action, value: Any, path: Path) -> Any:
    """An option's value as the command line would give it: argparse checks no defaults."""
    if value is None and option.default is None:
        return None
    if option.nargs in ("+", "*"):
        several = value if isinstance(value, list) else [value]
        return [_one(option, one, path) for one in several]
    return _one(option, value, path)


def _one(option: argparse.Action, value: Any, path: Path) -> Any:
    if option.nargs == 0:
        wanted, right = "true or false", isinstance(value, bool)
    elif option.type in (int, float):
        wanted = "an integer" if option.type is int else "a number"
        try:
            # YAML takes 1e-3 for text.
            number = option.type(value)
            right = isinstance(value, str) or (number == value and not isinstance(value, bool))
            value = number if right else value
        except (TypeError, ValueError, OverflowError):
            right = False
    else:
        if isinstance(value, bool) and "on" in (option.choices or ()):
            # YAML takes on and off for true and false.
            value = "on" if value else "off"
        if option.type is parts and isinstance(value, list):
            value = ",".join(map(str, value))
        wanted, right = "text", isinstance(value, str)
    if option.choices is not None:
        wanted = f"one of {', '.join(map(str, option.choices))}"
        right = right and value in option.choices
    if not right:
        raise ValueError(f"`{option.dest}` in {path} is {value!r} but has to be {wanted}.")
    return value


def parts(text: str) -> list[str]:
    """Names separated by commas."""
    return text.split(",")
