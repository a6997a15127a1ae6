"""The `mlx_dflash2.benchmark` command: what drafting brings here, and whether it is exact."""

from .command import main, setup_arg_parser

__all__ = ["main", "setup_arg_parser"]
