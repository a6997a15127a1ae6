"""The `mlx_dflash2.doctor` command: what fits, what it should bring, and what is wrong."""
