"""The `mlx_dflash2.doctor` command: what fits, what it should bring, and what is wrong."""

from .command import main, setup_arg_parser

__all__ = ["main", "setup_arg_parser"]
