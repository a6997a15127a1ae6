"""Commands by name."""

import importlib
from collections.abc import Callable
from types import ModuleType


def main_of(name: str) -> Callable[[], None]:
    """Return what runs a command on ``sys.argv``, as its console script does."""
    return importlib.import_module(f"mlx_dflash2.{name}.__main__").main


def options_of(name: str) -> ModuleType:
    """Return the module of a command's options."""
    return importlib.import_module(f"mlx_dflash2.{name}.options")
