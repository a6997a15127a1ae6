"""The `mlx_dflash2.benchmark` command: what drafting brings here, and whether it is exact."""
