"""The `mlx_dflash2.train` command: a DFlash 2 drafter for any target."""

from .arguments import setup_arg_parser
from .command import main

__all__ = ["main", "setup_arg_parser"]
