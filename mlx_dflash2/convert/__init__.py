"""The `mlx_dflash2.convert` command: a drafter in MLX format, quantised or not."""

from .command import main, setup_arg_parser

__all__ = ["main", "setup_arg_parser"]
