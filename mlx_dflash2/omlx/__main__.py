"""`python -m mlx_dflash2.omlx`."""

from .cli import main

main()
