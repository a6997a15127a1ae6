"""Race the kernel for few rows against MLX's own product, on the device and the weights in use.

A kernel that wins on one chip loses on another, so it is used only where it has won. Results are
kept in a file of the user's cache, as they belong to chip, system and versions.
"""

import json
import platform
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from .._version import __version__
from ..user_cache import user_cache
from ._common import LIBRARY, PlainFormWarning, disagreement
from .qmm_rows import MAX_ROWS, Packed, qmm_rows
from .shadow import packed, shadow

# Seconds that all races of a pair may take, and what one chain of calls should take.
BUDGET, CHAIN_SECONDS = 1.5, 0.003
# Chains of each form, in turns.
RUNS = 3
# A kernel has to win by this share. Past so many times MLX's own time it is believed to stall.
MARGIN, STALL = 0.03, 10.0
# Numbers of rows that are raced. Others take what was found for the next smaller one.
RACED_ROWS = (2, 3, 4, 6, 8, 9, 12, 16)
MOST_CALLS = 64
STALLS = f"it took more than {STALL:g} times as long as MLX's own"

Clock = Callable[[], float]


class Kind(NamedTuple):
    """What a product's time depends on: matrices [N, K] of one layout, and a number of rows."""

    K: int
    N: int
    bits: int
    group_size: int
    dtype: str
    offset: bool
    rows: int

    def __str__(self) -> str:
        return (
            f"{self.rows} rows, {self.K} x {self.N}, {self.bits} bits in groups of "
            f"{self.group_size}, {self.dtype}{' with offset' if self.offset else ''}"
        )


class Result(NamedTuple):
    """Seconds a call of the kernel and of MLX's own product, and why the kernel is out if it is."""

    kernel: float
    stock: float
    fault: str | None = None

    @property
    def wins(self) -> bool:
        """Whether the kernel is used."""
        return self.fault is None and self.kernel < self.stock * (1 - MARGIN)


@dataclass
class Race:
    """The results on one device.

    Attributes:
        results (dict): By kind.
        clock (callable): Tells the time in seconds.
    """

    results: dict[Kind, Result] = field(default_factory=dict)
    clock: Clock = time.perf_counter

    @property
    def stalled(self) -> bool:
        """Whether the kernel stalled once: then it is neither used nor tried again."""
        return any(result.fault == STALLS for result in self.results.values())

    def run(
        self, models: Iterable[nn.Module], most_rows: int, say: Callable[[str], None] | None = None
    ) -> None:
        """Race what was not raced so far, the largest matrices first, while there is time.

        Args:
            models (iterable of nn.Module): Target and drafter.
            most_rows (int): The most rows of a pass.
            say (callable, optional): Takes a line before the first race.
        """
        matrices = _by_kind(models)
        sizes = {kind: sum(m.weight.nbytes for m in found) for kind, found in matrices.items()}
        largest = sorted(matrices, key=lambda kind: -sizes[kind])
        kinds = [kind._replace(rows=rows) for kind in largest for rows in _raced(most_rows)]
        open_kinds = [kind for kind in kinds if kind not in self.results]
        if open_kinds and not self.stalled and say is not None:
            say(f"Racing kernels on this GPU, once, at most {BUDGET} s ...")
        start = self.clock()
        for kind in open_kinds:
            if self.stalled or self.clock() - start > BUDGET:
                return
            result = self.results[kind] = self._one(kind, matrices[kind._replace(rows=0)])
            if result.fault is not None:
                message = f"MLX's own product is used: {result.fault} ({kind})."
                warnings.warn(message, PlainFormWarning, stacklevel=3)

    def rows_of(self, module: nn.Module) -> frozenset[int]:
        """Return the numbers of rows for which the kernel won on a module's kind."""
        matrix, taken = packed(module), set[int]()
        if matrix is not None and not self.stalled:
            wins = False
            for rows in range(RACED_ROWS[0], MAX_ROWS + 1):
                result = self.results.get(_kind(matrix)._replace(rows=rows))
                if rows in RACED_ROWS:
                    wins = result is not None and result.wins
                if wins:
                    taken.add(rows)
        return frozenset(taken)

    def _one(self, kind: Kind, matrices: Sequence[Packed]) -> Result:
        x = mx.random.normal((kind.rows, kind.K), key=mx.random.key(0)) * 0.1
        x = x.astype(matrices[0].scales.dtype)
        mx.eval(x)
        if not qmm_rows.runs_kernel(x, matrices[0]):
            return Result(float("inf"), 0.0, "it does not run")
        fault = disagreement(qmm_rows.kernel, qmm_rows.ops, (x, matrices[0]))
        if fault is not None:
            return Result(float("inf"), 0.0, fault)
        # One call of each tells how long a chain may be, and whether the kernel stalls at once.
        stock = self._seconds(qmm_rows.ops, x, matrices, 1)
        kernel = self._seconds(qmm_rows.kernel, x, matrices, 1)
        if kernel > STALL * max(stock, CHAIN_SECONDS / MOST_CALLS):
            return Result(kernel, stock, STALLS)
        calls = max(2, min(MOST_CALLS, round(CHAIN_SECONDS / max(stock, 1e-9))))
        times = [
            [self._seconds(form, x, matrices, calls) for form in (qmm_rows.kernel, qmm_rows.ops)]
            for _ in range(RUNS)
        ]
        kernel, stock = (median(column) for column in zip(*times, strict=True))
        return Result(kernel, stock, STALLS if kernel > STALL * stock else None)

    def _seconds(
        self, form: Callable, x: mx.array, matrices: Sequence[Packed], calls: int
    ) -> float:
        """Time a call in a chain over matrices of one kind, as the layers of a model make it."""
        start = self.clock()
        for matrix in islice(cycle(matrices), calls):
            # MLX orders launches by the buffers that they share: the rows have to be new.
            x = x + form(x, matrix)[:1, :1] * 0
        mx.eval(x)
        return (self.clock() - start) / calls


def _raced(most_rows: int) -> list[int]:
    return [rows for rows in reversed(RACED_ROWS) if rows <= most_rows]


def _kind(matrix: Packed) -> Kind:
    N, groups = matrix.scales.shape
    dtype = str(matrix.scales.dtype).rpartition(".")[2]
    K = groups * matrix.group_size
    return Kind(K, N, matrix.bits, matrix.group_size, dtype, matrix.offset is not None, 0)


def _by_kind(models: Iterable[nn.Module]) -> dict[Kind, list[Packed]]:
    found: dict[Kind, list[Packed]] = {}
    for model in models:
        for module in model.modules():
            if (matrix := packed(module)) is not None:
                found.setdefault(_kind(matrix), []).append(matrix)
    return found


def race_file() -> Path:
    """Return the file in which results are kept."""
    return user_cache() / "race.json"


def device_key() -> str:
    """Name what results hold for: chip, system, and the versions of MLX and of this package."""
    info = mx.device_info()
    chip = f"{info.get('device_name', '')} {info.get('architecture', '')}".strip()
    system = platform.mac_ver()[0] or platform.release()
    return f"{chip} | {platform.system()} {system} | MLX {version('mlx')} | {__version__}"


def read_race(file: Path, key: str) -> Race:
    """Read the results that hold here; none if there is no such file, or it is damaged."""
    try:
        kept = json.loads(file.read_text(encoding="utf-8")).get(key, [])
        return Race({Kind(*kind): Result(*result) for kind, result in kept})
    except (OSError, ValueError, TypeError, AttributeError):
        return Race()


def write_race(race: Race, file: Path, key: str) -> None:
    """Keep results, those of other devices and versions included."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        content = {}
    content = content if isinstance(content, dict) else {}
    # JSON has no infinity.
    content[key] = [[*item] for item in race.results.items() if item[1].kernel < float("inf")]
    # Without the file the next process races again.
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(content), encoding="utf-8")
        partial.replace(file)


def race_here(
    models: Sequence[nn.Module], most_rows: int, say: Callable[[str], None] | None = None
) -> Race | None:
    """Race a pair on the default device, unless its results are known; see :meth:`Race.run`.

    Returns:
        Race: All results of the device; ``None`` if it is no GPU, or runs no kernel.
    """
    kernels, key = LIBRARY.on(str(mx.default_device())), device_key()
    if mx.default_device() != mx.gpu or kernels.unavailable:
        return None
    if kernels.race is None:
        kernels.race = read_race(race_file(), key)
    race: Race = kernels.race
    before = len(race.results)
    race.run(models, most_rows, say)
    if len(race.results) > before:
        write_race(race, race_file(), key)
    return race


def faster(models: Sequence[nn.Module], most_rows: int) -> list[nn.Module]:
    """Return shadows that take the kernel where it won; the models themselves without kernels.

    Args:
        models (sequence of nn.Module): Target and drafter.
        most_rows (int): The most rows of a pass.
    """
    race = race_here(models, most_rows)
    return list(models) if race is None else [shadow(model, race.rows_of) for model in models]
