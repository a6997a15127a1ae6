"""Commands by name."""

import importlib
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

import pytest


def main_of(name: str) -> Callable[[], None]:
    """Return what runs a command on ``sys.argv``, as its console script does."""
    return importlib.import_module(f"mlx_dflash2.{name}.__main__").main


def options_of(name: str) -> ModuleType:
    """Return the module of a command's options."""
    return importlib.import_module(f"mlx_dflash2.{name}.options")


def run_command(name: str, argv: Sequence[str]) -> None:
    """Run a command on arguments of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *argv])
        main_of(name)()
