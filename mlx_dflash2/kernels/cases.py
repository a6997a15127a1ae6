"""The inputs on which every kernel is checked, by the tests and by ``doctor`` alike."""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from . import references

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
# Largest error relative to the scale of its row, by the dtype of the output.
TOLERANCE = {mx.float32: 1e-5, mx.float16: 5e-3, mx.bfloat16: 5e-2}


@dataclass(frozen=True)
class Case:
    """One kernel on one set of inputs.

    ``make`` takes a dtype, one of ``dtypes``, and gives the arguments; ``real`` marks the shapes of
    published models, which take long to emulate.
    """

    kernel: str
    shape: str
    make: Callable[[mx.Dtype], tuple]
    real: bool = False
    dtypes: tuple[mx.Dtype, ...] = DTYPES

    def __str__(self) -> str:
        return f"{self.kernel}[{self.shape}]"

    def forms(self) -> tuple[Callable, Callable]:
        """The kernel and the plain MLX form."""
        module = importlib.import_module(f".{self.kernel}", __package__)
        return tuple(getattr(module, f"{self.kernel}_{form}") for form in ("kernel", "ops"))

    def expected(self, arguments: tuple) -> tuple[np.ndarray, ...]:
        """What float64 NumPy computes from the same inputs."""
        return getattr(references, self.kernel)(*(_to_numpy(x) for x in arguments))


def largest_error(outputs: tuple[mx.array, ...], expected: tuple[np.ndarray, ...]) -> float:
    """The largest error in units of its tolerance: at most 1 is right.

    Integers have to be equal; a float's error is relative to the scale of its row.
    """
    errors = []
    for got, want in zip(outputs, expected, strict=True):
        values = _to_numpy(got)
        if not mx.issubdtype(got.dtype, mx.floating):
            errors.append(0.0 if np.array_equal(values, want) else np.inf)
            continue
        scale = np.abs(np.where(np.isfinite(want), want, 0)).max(axis=-1, keepdims=True)
        # Equal infinities differ by NaN; any other NaN is an error.
        difference = np.where(values == want, 0, np.abs(values - want))
        error = np.max(difference / np.where(scale > 0, scale, 1)) / TOLERANCE[got.dtype]
        errors.append(np.inf if np.isnan(error) else error)
    return float(max(errors))


def _to_numpy(x):
    if isinstance(x, tuple):
        return tuple(map(_to_numpy, x))
    if not isinstance(x, mx.array):
        return x
    if mx.issubdtype(x.dtype, mx.floating):
        return np.array(x.astype(mx.float32)).astype(np.float64)
    return np.array(x).astype(np.int64)


class _Random:
    """Seeded arrays in a given dtype."""

    def __init__(self, dtype: mx.Dtype, seed: int = 0):
        self.dtype, self.rng = dtype, np.random.default_rng(seed)

    def normal(self, *shape: int, dtype: mx.Dtype | None = None, scale: float = 1.0) -> mx.array:
        values = mx.array((self.rng.standard_normal(shape) * scale).astype(np.float32))
        return values.astype(dtype or self.dtype)

    def uniform(self, *shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
        return mx.array(self.rng.uniform(size=shape).astype(np.float32)).astype(dtype)

    def ids(self, limit: int, *shape: int) -> mx.array:
        return mx.array(self.rng.integers(0, limit, shape).astype(np.uint32))


def _logits(rows: int, size: int, k: int, kind: str, *transform: float) -> Callable:
    def make(dtype: mx.Dtype) -> tuple:
        random = _Random(dtype)
        if kind == "random":
            return random.normal(rows, size, scale=4), k, *transform
        if kind == "tied":
            return random.ids(12, rows, size).astype(dtype), k, *transform
        values = {
            "equal": np.zeros(size),
            "rising": np.arange(size),
            "falling": -np.arange(size),
            # All winners among the entries of one thread.
            "clustered": np.where(np.arange(size) % 256 == 3, 1 + np.arange(size) % 7, 0),
            "infinite": np.where(np.arange(size) % 2, -np.inf, np.arange(size) % 5),
        }[kind]
        return mx.broadcast_to(mx.array(values.astype(np.float32)), (rows, size)).astype(dtype), k

    return make


def _top_k() -> Iterator[Case]:
    shapes = [(1, 1, 1), (1, 7, 3), (2, 5, 5), (3, 1000, 16), (2, 9001, 64), (32, 300, 16)]
    for rows, size, k in shapes:
        yield Case("top_k", f"{rows}x{size} k{k}", _logits(rows, size, k, "random"))
    yield Case("top_k", "7x9001 k16 softcap", _logits(7, 9001, 16, "random", 0.2, 20.0))
    for kind in ("tied", "equal", "rising", "falling", "clustered", "infinite"):
        yield Case("top_k", f"2x9001 k16 {kind}", _logits(2, 9001, 16, kind))
    # The last shard has one entry.
    lonely = _logits(1, 253953, 16, "random")
    yield Case("top_k", "1x253953 k16", lonely, dtypes=(mx.float32,))
    for rows, size in ((7, 151936), (7, 248320), (1, 262144)):
        yield Case("top_k", f"{rows}x{size} k16", _logits(rows, size, 16, "tied"), real=True)


def _pairs(B: int, L: int, K: int, R: int, V: int, tied: bool = False) -> Callable:
    def make(dtype: mx.Dtype) -> tuple:
        random = _Random(dtype, seed=K)
        whole = {"scale": 1.0} if not tied else {"scale": 0.0}
        return (
            random.ids(V, B),
            random.ids(V, B, L, K),
            mx.round(random.normal(B, L, K, dtype=mx.float32) * 2) / 2
            if tied
            else random.normal(B, L, K, dtype=mx.float32),
            random.normal(B, L, R),
            random.normal(V, R, **whole),
            random.normal(V, R, scale=0.3),
        )

    return make


_PAIRS = [(1, 1, 1, 8, 3), (2, 3, 5, 33, 40), (1, 4, 16, 64, 500), (1, 2, 64, 40, 300)]
_REAL_PAIRS = [(1, 7, 16, 256, 5000), (2, 15, 32, 256, 5000)]


def _pair_score() -> Iterator[Case]:
    for shape in _PAIRS + _REAL_PAIRS:
        label = "B{} L{} K{} R{} V{}".format(*shape)
        yield Case("pair_score", label, _pairs(*shape), real=shape in _REAL_PAIRS)


def _walk(
    B: int, L: int, K: int, temperature: float = 0.0, tied: bool = False, scale: float = 2.0
) -> Callable:
    def make(dtype: mx.Dtype) -> tuple:
        random = _Random(mx.float32, seed=L * K)
        # Past the range of float32 a score is infinite.
        with np.errstate(over="ignore"):
            scores = random.normal(B, L, K, K, scale=scale)
        scores = mx.round(scores) if tied else scores
        drawing = (temperature, random.uniform(B, L)) if temperature else ()
        return scores, random.ids(1000, B, L, K), *drawing

    return make


def _path_walk() -> Iterator[Case]:
    for B, L, K in ((1, 1, 1), (2, 3, 5), (3, 7, 16), (1, 31, 33), (1, 4, 64)):
        label = f"B{B} L{L} K{K}"
        # Steep scores overflow unless the largest is taken off first.
        kinds = {"": (), " T0.8": (0.8,), " steep": (0.8, False, 300.0), " tied": (0.0, True)}
        kinds[" infinite"] = (0.0, False, 3e38)
        for suffix, how in kinds.items():
            make = _walk(B, L, K, *how)
            yield Case("path_walk", label + suffix, make, dtypes=(mx.float32,))


def _pair_walk() -> Iterator[Case]:
    def make(shape: tuple, temperature: float, tied: bool) -> Callable:
        def sampled(dtype: mx.Dtype) -> tuple:
            drawing = (temperature, _Random(dtype, seed=3).uniform(*shape[:2]))
            return *_pairs(*shape, tied)(dtype), *(drawing if temperature else ())

        return sampled

    for shape in _PAIRS + _REAL_PAIRS:
        real = shape in _REAL_PAIRS
        label = "B{} L{} K{} R{} V{}".format(*shape)
        yield Case("pair_walk", label, make(shape, 0.0, False), real)
        yield Case("pair_walk", f"{label} T8", make(shape, 8.0, False), real)
        yield Case("pair_walk", f"{label} tied", make(shape, 0.0, True), real)


def _conv(B: int, L: int, H: int, G: int, K: int, residual: mx.Dtype | None = None) -> Callable:
    def make(dtype: mx.Dtype) -> tuple:
        random = _Random(dtype)
        # As the drafter has them: both sides of the projection in one array, not contiguous.
        both = random.normal(B, L, 2, K, G, scale=0.3)
        added = () if residual is None else (random.normal(B, L, H, dtype=residual),)
        return random.normal(B, L, H), random.normal(2, K, H)[1], both[:, :, 1], *added

    return make


_CONVS = [(1, 1, 4, 2, 2), (2, 8, 96, 3, 2), (3, 5, 40, 40, 5), (1, 32, 64, 8, 1)]
_REAL_CONV = (1, 8, 5120, 320, 2)


def _grouped_conv() -> Iterator[Case]:
    for shape in [*_CONVS, _REAL_CONV]:
        label = "B{} L{} H{} G{} K{}".format(*shape)
        real = shape == _REAL_CONV
        yield Case("grouped_conv", label, _conv(*shape), real)
        yield Case("grouped_conv", f"{label} +float32", _conv(*shape, mx.float32), real)


def _grouped_conv_norm() -> Iterator[Case]:
    def make(shape: tuple) -> Callable:
        def with_norm(dtype: mx.Dtype) -> tuple:
            weight = _Random(dtype, seed=1).normal(shape[2])
            return *_conv(*shape, mx.float32)(dtype), weight, 1e-6

        return with_norm

    for shape in [*_CONVS, _REAL_CONV]:
        label = "B{} L{} H{} G{} K{}".format(*shape)
        yield Case("grouped_conv_norm", label, make(shape), shape == _REAL_CONV)


def _delta(B: int, T: int, P: int, Hk: int, Hv: int, Dk: int, Dv: int) -> Callable:
    def make(dtype: mx.Dtype) -> tuple:
        random = _Random(dtype)

        def rows(n: int) -> list[mx.array]:
            key, query = (random.normal(B, n, Hk, Dk, scale=Dk**-0.5) for _ in range(2))
            value = random.normal(B, n, Hv, Dv)
            beta = random.uniform(B, n, Hv, dtype=dtype)
            return [query, key, value, random.uniform(B, n, Hv), beta]

        state = random.normal(B, Hv, Dv, Dk, dtype=mx.float32)
        kept = mx.array([(P + b) % (P + 1) for b in range(B)], mx.int32)
        return *rows(T), state, tuple(rows(P)[1:]), kept

    return make


def _gated_delta_verify() -> Iterator[Case]:
    shapes = [(1, 1, 1, 1, 1, 4, 3), (2, 3, 4, 2, 4, 16, 8), (1, 3, 3, 1, 2, 128, 16)]
    real = [(1, 8, 8, 16, 48, 128, 128), (1, 8, 8, 16, 32, 128, 128)]
    for shape in shapes + real:
        label = "B{} T{} P{} Hk{} Hv{} Dk{} Dv{}".format(*shape)
        yield Case("gated_delta_verify", label, _delta(*shape), shape in real)


def all_cases() -> list[Case]:
    """Every case of every kernel."""
    makers = (_top_k, _pair_score, _path_walk, _pair_walk)
    makers += (_grouped_conv, _grouped_conv_norm, _gated_delta_verify)
    return [case for make in makers for case in make()]
