"""The walk that picks one candidate a position, left to right."""

import mlx.core as mx

from ._common import MAX_K, build, pattern, scalar, unused, use_kernel

HEADERS = ("order.h", "choose.h")
OUTPUTS = ("tokens", "choices", "q")


def path_walk_ops(
    scores: mx.array,
    candidates: mx.array,
    temperature: float = 0.0,
    uniforms: mx.array | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """Follow the pair scores from the anchor, one candidate a position.

    At temperature 0 every step takes the best candidate (lowest index wins ties) and q is
    one-hot. Above it, a step draws from ``softmax(scores / temperature)`` by inverse CDF: the
    number of cumulative sums that the position's uniform has reached, at most K - 1.

    Shapes:
      - scores: [B, L, K, K] float32, from :func:`pair_score`
      - candidates: [B, L, K] token ids
      - uniforms: [B, L] in [0, 1), required above temperature 0
    Returns:
      - tokens: [B, L], the ids along the path, dtype of ``candidates``
      - choices: [B, L] uint32, their indices into the candidates
      - q: [B, L, K] float32, the distribution that each step drew from
    """
    B, L, K, _ = scores.shape
    _check(temperature, uniforms)
    choice = mx.zeros((B, 1), dtype=mx.uint32)
    choices, rows = [], []
    for t in range(L):
        row = mx.take_along_axis(scores[:, t], choice[:, :, None], axis=1)[:, 0]
        if temperature > 0:
            q = mx.softmax(row / temperature, axis=-1, precise=True)
            reached = uniforms[:, t, None] >= mx.cumsum(q, axis=-1)
            choice = mx.minimum(reached.sum(axis=-1, keepdims=True), K - 1).astype(mx.uint32)
        else:
            choice = mx.argmax(row, axis=-1, keepdims=True)
            q = (mx.arange(K, dtype=mx.uint32) == choice).astype(mx.float32)
        choices.append(choice)
        rows.append(q)
    choices = mx.concatenate(choices, axis=1)
    tokens = mx.take_along_axis(candidates, choices[:, :, None], axis=-1)[..., 0]
    return tokens, choices, mx.stack(rows, axis=1)


def _check(temperature: float, uniforms: mx.array | None) -> None:
    if temperature > 0 and uniforms is None:
        raise ValueError("`uniforms` are required when `temperature` is above 0.")


def drawing_inputs(temperature: float, uniforms: mx.array | None) -> list[mx.array]:
    """The inputs that only a sampled walk reads."""
    _check(temperature, uniforms)
    return [scalar(temperature), uniforms if temperature > 0 else unused(mx.float32)]


def output_spec(candidates: mx.array) -> dict[str, list]:
    B, L, K = candidates.shape
    return {
        "output_shapes": [(B, L), (B, L), (B, L, K)],
        "output_dtypes": [candidates.dtype, mx.uint32, mx.float32],
    }


def path_walk_kernel(
    scores: mx.array,
    candidates: mx.array,
    temperature: float = 0.0,
    uniforms: mx.array | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """As :func:`path_walk_ops`, in one launch. NaN counts as -infinity."""
    B, _, K = candidates.shape
    names = ("scores", "candidates", "temperature", "uniforms")
    return tuple(
        build("path_walk", names, OUTPUTS, HEADERS)(
            inputs=[scores, candidates, *drawing_inputs(temperature, uniforms)],
            template=[("K", K), ("SAMPLED", temperature > 0)],
            grid=(32, B, 1),
            threadgroup=(32, 1, 1),
            **output_spec(candidates),
        )
    )


def path_walk(
    scores: mx.array,
    candidates: mx.array,
    temperature: float = 0.0,
    uniforms: mx.array | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """:func:`path_walk_kernel` where it runs, else :func:`path_walk_ops`."""
    form = path_walk_ops
    K = candidates.shape[-1]
    if K <= MAX_K and candidates.size > 0:
        specialisation = (K, candidates.dtype, temperature > 0)

        def example() -> tuple:
            ids = mx.arange(2 * K).reshape(1, 2, K).astype(candidates.dtype)
            return pattern((1, 2, K, K)), ids, temperature, mx.array([[0.3, 0.7]])

        if use_kernel(path_walk_kernel, path_walk_ops, specialisation, example):
            form = path_walk_kernel
    return form(scores, candidates, temperature, uniforms)
