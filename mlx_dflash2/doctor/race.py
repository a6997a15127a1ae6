"""Print the race between this package's kernel and MLX's own product, on the weights of a pair."""

from collections.abc import Iterator

from mlx_lm.generate import wired_limit

from ..kernels.race import Race, race_here
from ..pairs.load import Pair
from .kernels import why_no_kernels

NO_GPU = "MLX computes on the CPU"

_ROW = "{:>4}  {:>7} x {:<7} {:>4}  {:>5}  {:<9} {:>10} {:>10} {:>6}  {}"


def race_pair(pair: Pair) -> Race:
    """Race until every kind of product of a pair has a result.

    Raises:
        ValueError: if no kernel runs here, in one line.
    """
    models, block = [pair.model, pair.drafter], pair.drafter.block_size
    race, known = None, -1
    with wired_limit(pair.model):
        # A single call has a limit of its own on its time.
        while (race := race_here(models, block)) is not None and len(race.results) > known:
            known = len(race.results)
    if race is None:
        raise ValueError(f"No Metal kernel runs on this machine: {why_no_kernels() or NO_GPU}")
    return race


def table(race: Race) -> Iterator[str]:
    """Yield a line for each result, the verdict last."""
    yield _ROW.format(
        "rows", "K", "N", "bits", "group", "dtype", "kernel us", "MLX us", "times", "used"
    )
    for kind, result in sorted(race.results.items()):
        won = result.fault or ("kernel" if result.wins else "MLX")
        times = result.stock / result.kernel
        yield _ROW.format(
            kind.rows, kind.K, kind.N, kind.bits, kind.group_size, kind.dtype,
            f"{1e6 * result.kernel:.4g}", f"{1e6 * result.stock:.4g}", f"{times:.2f}", won,
        )  # fmt: skip
    wins = 0 if race.stalled else sum(result.wins for result in race.results.values())
    yield f"the kernel is used for {wins} of {len(race.results)}"
