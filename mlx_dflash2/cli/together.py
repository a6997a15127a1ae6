"""Run a command in the processes of a distributed run: rank 0 speaks, and they end together."""

import importlib.metadata
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout

import mlx.core as mx

from .._version import __version__
from ..ranks import Ranks
from .watch import Watch


def ranks() -> Ranks:
    """Return the processes that `mlx.launch` started, or this one alone.

    Raises:
        ValueError: if they cannot reach each other.
    """
    try:
        return Ranks(mx.distributed.init())
    except RuntimeError as error:
        raise ValueError(f"The ranks cannot reach each other: {error}") from error


@contextmanager
def together() -> Iterator[list[str]]:
    """Yield rank 0's arguments; other ranks print nothing but the error that ends them.

    Raises:
        ValueError: if the ranks run different versions.
    """
    all_ranks = ranks()
    if all_ranks.size == 1:
        yield sys.argv[1:]
        return
    with Watch(all_ranks), _quiet(all_ranks.rank > 0):
        packages = ("mlx", "mlx-lm", "transformers")
        versions = {name: importlib.metadata.version(name) for name in packages}
        all_ranks.check_same("versions", {"mlx_dflash2": __version__} | versions)
        argv, seed = all_ranks.share([sys.argv[1:], int.from_bytes(os.urandom(4))])
        mx.random.seed(seed)
        yield argv


@contextmanager
def _quiet(silent: bool) -> Iterator[None]:
    """Print nothing, if ``silent`` is set."""
    with ExitStack() as stack:
        if silent:
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(redirect_stderr(nowhere))
        yield
