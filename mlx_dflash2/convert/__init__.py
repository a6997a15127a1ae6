"""The `mlx_dflash2.convert` command: a drafter in MLX format, quantised or not."""
