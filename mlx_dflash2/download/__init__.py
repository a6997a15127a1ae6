"""The `mlx_dflash2.download` command: fetch a pair, after a line about its size."""
