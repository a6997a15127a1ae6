"""The `mlx_dflash2.convert` command: a drafter in MLX format, quantized or not."""
