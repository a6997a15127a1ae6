"""The `mlx_dflash2.train` command: a DFlash 2 drafter for any target."""
