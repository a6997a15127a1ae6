"""The `mlx_dflash2.demo` command: the embedded pair, drafted and plain."""
