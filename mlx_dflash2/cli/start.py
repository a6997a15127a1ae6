"""Start a command: parse its options, load a fast BLAS, then import everything else."""

import argparse
import importlib
import re
import sys
from functools import partial

from ..blas.load import load_fast_blas
from .console import note, run
from .versions import tell_versions


def start(package: str) -> None:
    """Run a command on the process's arguments.

    Its module ``options`` imports no MLX, so that help and a wrong use are answered at once; its
    module ``command`` is imported after that.

    Args:
        package (str): The command's package, such as ``mlx_dflash2.generate``.
    """
    run(partial(_start, package))


def _start(package: str) -> None:
    args = importlib.import_module(".options", package).parse(sys.argv[1:])
    tell_versions()
    # A command that does not multiply matrices has no such flag.
    if not getattr(args, "no_fast_blas", True) and (problem := load_fast_blas()) is not None:
        note(f"warning: {problem}")
    try:
        importlib.import_module(".command", package).main(args)
    except ValueError as error:
        raise ValueError(as_flags(str(error), args)) from error


def as_flags(text: str, args: argparse.Namespace) -> str:
    """Spell the options that an error names in Python's way as the flags that were typed."""
    names = "|".join(map(re.escape, vars(args)))
    return re.sub(rf"`({names})`", lambda found: f"--{found[1].replace('_', '-')}", text)
