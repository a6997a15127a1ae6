"""Start a command: first a fast BLAS, then everything that imports MLX."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any

from ..blas.load import load_fast_blas

FLAG = "--no-fast-blas"
# argparse takes an abbreviation that is as long as this.
_SHORTEST = "--no-f"


class _HandledAtStart(argparse.Action):
    """A flag that :func:`start` has looked for; it leaves nothing among the arguments."""

    def __call__(self, *_: Any) -> None:
        pass


def add_blas_argument(parser: argparse._ActionsContainer) -> None:
    """Add the flag that :func:`start` looks for."""
    parser.add_argument(
        FLAG,
        action=_HandledAtStart,
        dest=argparse.SUPPRESS,
        nargs=0,
        help="On Linux, let MLX multiply with the BLAS of its own package, which is slow",
    )


def start(package: str, fast_blas: bool = True) -> None:
    """Run a command.

    Args:
        package (str): The command's package, such as ``mlx_dflash2.generate``.
        fast_blas (bool): Whether it multiplies matrices. Default: ``True``.
    """
    if fast_blas and not is_switched_off(sys.argv[1:]):
        if (problem := load_fast_blas()) is not None:
            print(f"warning: {problem}", file=sys.stderr, flush=True)
    importlib.import_module(".command", package).main()


def is_switched_off(arguments: Sequence[str]) -> bool:
    """Return whether the flag is among arguments, which are parsed only after MLX is imported."""
    return any(FLAG.startswith(text) and text.startswith(_SHORTEST) for text in arguments)
