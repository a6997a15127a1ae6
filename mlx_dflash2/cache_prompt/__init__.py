"""The `mlx_dflash2.cache_prompt` command: a prompt's caches in a file, for later answers."""
