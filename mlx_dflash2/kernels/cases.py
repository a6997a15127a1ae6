"""The inputs on which every kernel is checked, by the tests and by ``doctor`` alike."""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from . import references
from .gated_delta_verify import DeltaRows
from .grouped_conv_norm import ConvInputs
from .pair_score import PairInputs
from .qmm_rows import Packed

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
# Largest error relative to the scale of its row, by the dtype of the output.
TOLERANCE = {mx.float32: 1e-5, mx.float16: 5e-3, mx.bfloat16: 5e-2}


@dataclass(frozen=True)
class Case:
    """One kernel on one set of inputs.

    Attributes:
        kernel: Its name.
        shape: A label.
        make: Makes the arguments in a dtype.
        real: Whether the shapes are those of published models, which take long to emulate.
        dtypes: What ``make`` takes.
        plain_error: What the plain form's error may be, in units of the tolerance.
    """

    kernel: str
    shape: str
    make: Callable[[mx.Dtype], tuple]
    real: bool = False
    dtypes: tuple[mx.Dtype, ...] = DTYPES
    plain_error: float = 1.0

    def __str__(self) -> str:
        return f"{self.kernel}[{self.shape}]"

    def forms(self) -> tuple[Callable, Callable]:
        """Return the kernel and the plain MLX form."""
        module = importlib.import_module(f".{self.kernel}", __package__)
        op = getattr(module, self.kernel)
        return op.kernel, op.ops

    def expected(self, arguments: tuple) -> tuple[np.ndarray, ...]:
        """Compute the outputs from the same inputs in float64 NumPy."""
        return getattr(references, self.kernel)(*(_to_numpy(x) for x in arguments))


def largest_error(outputs: tuple[mx.array, ...], expected: tuple[np.ndarray, ...]) -> float:
    """Return the largest error in units of its tolerance: at most 1 is right.

    Integers have to be equal; a float's error is relative to the scale of its row.
    """
    errors: list[float] = []
    for got, want in zip(outputs, expected, strict=True):
        values = _to_numpy(got)
        if not mx.issubdtype(got.dtype, mx.floating):
            errors.append(0.0 if np.array_equal(values, want) else np.inf)
            continue
        scale = np.abs(np.where(np.isfinite(want), want, 0)).max(axis=-1, keepdims=True)
        # The difference of equal infinities is NaN; any other NaN is an error.
        with np.errstate(invalid="ignore"):
            difference = np.where(values == want, 0, np.abs(values - want))
        error = np.max(difference / np.where(scale > 0, scale, 1)) / TOLERANCE[got.dtype]
        errors.append(np.inf if np.isnan(error) else error)
    return float(max(errors))


def _to_numpy(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(map(_to_numpy, x))
    if not isinstance(x, mx.array):
        return x
    if mx.issubdtype(x.dtype, mx.floating):
        return np.array(x.astype(mx.float32)).astype(np.float64)
    return np.array(x).astype(np.int64)


class _Random:
    """Seeded arrays in a given dtype."""

    def __init__(self, dtype: mx.Dtype, seed: int = 0) -> None:
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


PairShape = tuple[int, int, int, int, int]


def _pairs(shape: PairShape, kind: str = "", temperature: float = 0.0) -> Callable:
    """``tied`` scores are equal in many places; ``padding`` ids are beyond the codebooks."""
    B, L, K, R, V = shape

    def make(dtype: mx.Dtype) -> tuple:
        random, beyond = _Random(dtype, seed=K), V if kind == "padding" else 0
        unary = random.normal(B, L, K, dtype=mx.float32)
        inputs = PairInputs(
            random.ids(V, B) + beyond,
            random.ids(V + beyond, B, L, K),
            mx.round(unary * 2) / 2 if kind == "tied" else unary,
            random.normal(B, L, R),
            random.normal(V, R, scale=0.0 if kind == "tied" else 1.0),
            random.normal(V, R, scale=0.3),
        )
        drawing = (temperature, _Random(dtype, seed=3).uniform(B, L)) if temperature else ()
        return inputs, *drawing

    return make


_PAIRS: list[PairShape] = [
    (1, 1, 1, 8, 3), (2, 3, 5, 33, 40), (1, 4, 16, 64, 500), (1, 2, 64, 40, 300),
]  # fmt: skip
_REAL_PAIRS: list[PairShape] = [(1, 7, 16, 256, 5000), (2, 15, 32, 256, 5000)]


def _pair_score() -> Iterator[Case]:
    for shape in _PAIRS + _REAL_PAIRS:
        label = "B{} L{} K{} R{} V{}".format(*shape)
        yield Case("pair_score", label, _pairs(shape), shape in _REAL_PAIRS)
    yield Case("pair_score", "B2 L3 K5 R33 V40 padding", _pairs(_PAIRS[1], "padding"))


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
        makers = {
            "": _walk(B, L, K),
            " T0.8": _walk(B, L, K, 0.8),
            # Steep scores overflow unless the largest is taken off first.
            " steep": _walk(B, L, K, 0.8, scale=300.0),
            " tied": _walk(B, L, K, tied=True),
            " infinite": _walk(B, L, K, scale=3e38),
        }
        for suffix, make in makers.items():
            label = f"B{B} L{L} K{K}{suffix}"
            yield Case("path_walk", label, make, dtypes=(mx.float32,))


def _pair_walk() -> Iterator[Case]:
    for shape in _PAIRS + _REAL_PAIRS:
        real = shape in _REAL_PAIRS
        label = "B{} L{} K{} R{} V{}".format(*shape)
        yield Case("pair_walk", label, _pairs(shape), real)
        yield Case("pair_walk", f"{label} T8", _pairs(shape, temperature=8.0), real)
        yield Case("pair_walk", f"{label} tied", _pairs(shape, "tied"), real)
    yield Case("pair_walk", "B2 L3 K5 R33 V40 padding T8", _pairs(_PAIRS[1], "padding", 8.0))


ConvShape = tuple[int, int, int, int, int]


def _conv(shape: ConvShape) -> Callable[[mx.Dtype], tuple[mx.array, ...]]:
    B, L, H, G, K = shape

    def make(dtype: mx.Dtype) -> tuple[mx.array, ...]:
        random = _Random(dtype)
        # As the drafter has them: both sides of the projection in one array, not contiguous.
        both = random.normal(B, L, 2, K, G, scale=0.3)
        return random.normal(B, L, H), random.normal(2, K, H)[1], both[:, :, 1]

    return make


_REAL_CONV: ConvShape = (1, 8, 5120, 320, 2)
_CONVS: list[ConvShape] = [
    (1, 1, 4, 2, 2), (2, 8, 96, 3, 2), (3, 5, 40, 40, 5), (1, 32, 64, 8, 1), _REAL_CONV,
]  # fmt: skip


def _grouped_conv() -> Iterator[Case]:
    for shape in _CONVS:
        label = "B{} L{} H{} G{} K{}".format(*shape)
        yield Case("grouped_conv", label, _conv(shape), shape == _REAL_CONV)


def _grouped_conv_norm() -> Iterator[Case]:
    def made(shape: ConvShape) -> Callable:
        def make(dtype: mx.Dtype) -> tuple:
            x, base, dynamic = _conv(shape)(dtype)
            random = _Random(dtype, seed=1)
            residual = random.normal(*x.shape, dtype=mx.float32)
            return ConvInputs(x, base, dynamic, residual, random.normal(shape[2])), 1e-6

        return make

    for shape in _CONVS:
        label = "B{} L{} H{} G{} K{}".format(*shape)
        yield Case("grouped_conv_norm", label, made(shape), shape == _REAL_CONV)


def _delta(B: int, T: int, P: int, Hk: int, Hv: int, Dk: int, Dv: int) -> Callable:
    def make(dtype: mx.Dtype) -> tuple:
        random = _Random(dtype)

        def rows(n: int) -> DeltaRows:
            key, value = random.normal(B, n, Hk, Dk, scale=Dk**-0.5), random.normal(B, n, Hv, Dv)
            decay, beta = random.uniform(B, n, Hv), random.uniform(B, n, Hv, dtype=dtype)
            return DeltaRows(key, value, decay, beta)

        query = random.normal(B, T, Hk, Dk, scale=Dk**-0.5)
        state = random.normal(B, Hv, Dv, Dk, dtype=mx.float32)
        kept = mx.array([(P + b) % (P + 1) for b in range(B)], mx.int32)
        return query, rows(T), state, rows(P), kept

    return make


def _gated_delta_verify() -> Iterator[Case]:
    shapes = [(1, 1, 1, 1, 1, 4, 3), (2, 3, 4, 2, 4, 16, 8), (1, 3, 3, 1, 2, 128, 16)]
    real = [(1, 8, 8, 16, 48, 128, 128), (1, 8, 8, 16, 32, 128, 128)]
    for shape in shapes + real:
        label = "B{} T{} P{} Hk{} Hv{} Dk{} Dv{}".format(*shape)
        yield Case("gated_delta_verify", label, _delta(*shape), shape in real)


def quantized_matrix(
    M: int, K: int, N: int, group_size: int, bits: int, biased: bool = False
) -> Callable[[mx.Dtype], tuple[mx.array, Packed]]:
    """Return what makes M rows and a quantized matrix [N, K]."""

    def make(dtype: mx.Dtype) -> tuple[mx.array, Packed]:
        random = _Random(dtype, seed=M + N)
        weights = random.normal(N, K, dtype=mx.float32, scale=0.05)
        weight, *rest = mx.quantize(weights, group_size=group_size, bits=bits)
        scales, biases = (part.astype(dtype) for part in rest)
        offset = random.normal(N) if biased else None
        return random.normal(M, K), Packed(weight, scales, biases, group_size, bits, offset)

    return make


def _qmm_rows() -> Iterator[Case]:
    shapes = [
        (2, 32, 1, 32, 4, False), (8, 512, 40, 64, 4, False), (5, 1024, 16, 64, 4, True),
        (3, 288, 17, 32, 4, False), (7, 768, 33, 128, 4, True), (16, 512, 33, 64, 4, False),
        (9, 96, 7, 32, 4, True), (4, 1088, 1029, 64, 4, False), (6, 320, 19, 64, 8, False),
        (12, 160, 21, 32, 8, True), (8, 1152, 35, 128, 8, False),
    ]  # fmt: skip
    real = [(8, 5120, 17408, 64, 4, False), (8, 17408, 5120, 64, 4, False)]
    for shape in shapes + real:
        label = "M{} K{} N{} g{} b{}".format(*shape) + (" offset" if shape[-1] else "")
        # MLX's CPU backend adds up in the dtype of the rows.
        yield Case("qmm_rows", label, quantized_matrix(*shape), shape in real, plain_error=20.0)


def _logprobs(rows: int, size: int, p: float, kind: str, seed: int = 0) -> Callable:
    def make(dtype: mx.Dtype) -> tuple:
        random = _Random(mx.float32, seed)
        logits = random.normal(rows, size, scale=3)
        if kind == "tied":
            logits = mx.round(logits)
        if kind == "infinite":
            logits = mx.where(random.uniform(rows, size) < 0.5, -mx.inf, logits)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        return logprobs.astype(dtype), p

    return make


def _top_p() -> Iterator[Case]:
    for rows, size, p in ((1, 1, 0.5), (2, 40, 0.7), (3, 1000, 0.95), (2, 2500, 0.05)):
        for kind in ("", "tied", "infinite")[: 1 if size == 1 else 3]:
            label = f"{rows}x{size} p{p} {kind}".strip()
            yield Case("top_p", label, _logprobs(rows, size, p, kind))
    yield Case("top_p", "8x248320 p0.95", _logprobs(8, 248320, 0.95, "tied"), real=True)


def all_cases() -> list[Case]:
    """Return every case of every kernel."""
    makers: list[Callable[[], Iterator[Case]]] = [
        _top_k, _pair_score, _path_walk, _pair_walk,
        _grouped_conv, _grouped_conv_norm, _gated_delta_verify, _qmm_rows, _top_p,
    ]  # fmt: skip
    return [case for make in makers for case in make()]
