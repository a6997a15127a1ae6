"""The walk that picks one candidate a position, left to right."""

from typing import NamedTuple

import mlx.core as mx

from ._common import LIBRARY, MAX_K, Op, Probe, pattern, placeholder

HEADERS = ("order.h", "choose.h")


class Walk(NamedTuple):
    """A path through the candidates.

    Attributes:
        tokens (mx.array): The ids along the path, [B, L], dtype of the candidates.
        choices (mx.array): Their indices into the candidates, [B, L] uint32.
        q (mx.array): The distribution that each step drew from, [B, L, K] float32.
    """

    tokens: mx.array
    choices: mx.array
    q: mx.array


def path_walk_ops(
    scores: mx.array, candidates: mx.array, temperature: float = 0, uniforms: mx.array | None = None
) -> Walk:
    """Follow pair scores from the anchor, one candidate a position.

    At temperature 0 every step takes the best candidate (lowest index wins ties) and q is
    one-hot. Above it, a step draws from ``softmax(scores / temperature)`` by inverse CDF: the
    number of cumulative sums that the position's uniform has reached, at most K - 1.

    To be used where the scores exist already; :func:`pair_walk` makes those that it meets.

    Args:
        scores (mx.array): [B, L, K, K] float32, from :func:`pair_score`.
        candidates (mx.array): Token ids [B, L, K].
        temperature (float): Default: ``0``.
        uniforms (mx.array, optional): [B, L] in [0, 1), required above temperature 0.

    Raises:
        ValueError: if ``uniforms`` are missing.
    """
    L, K = candidates.shape[1:]
    _, draws = drawing_inputs(temperature, uniforms)
    chosen: list[mx.array] = []
    drawn_from: list[mx.array] = []
    # Whatever comes before the first position is the anchor.
    step = scores[:, 0, 0]
    for t in range(L):
        if chosen:
            step = mx.take_along_axis(scores[:, t], chosen[-1][:, :, None], axis=1)[:, 0]
        if temperature > 0:
            q = mx.softmax(step / temperature, axis=-1, precise=True)
            reached = draws[:, t, None] >= mx.cumsum(q, axis=-1)
            choice = mx.minimum(reached.sum(axis=-1, keepdims=True), K - 1).astype(mx.uint32)
            drawn_from.append(q)
        else:
            choice = mx.argmax(step, axis=-1, keepdims=True)
        chosen.append(choice)
    choices = mx.concatenate(chosen, axis=1)
    if temperature > 0:
        q = mx.stack(drawn_from, axis=1)
    else:
        q = (mx.arange(K, dtype=mx.uint32) == choices[..., None]).astype(mx.float32)
    tokens = mx.take_along_axis(candidates, choices[..., None], axis=-1)[..., 0]
    return Walk(tokens, choices, q)


def drawing_inputs(temperature: float, uniforms: mx.array | None) -> tuple[float, mx.array]:
    """Complete the inputs that only a sampled walk reads.

    Raises:
        ValueError: if a sampled walk has no uniforms.
    """
    if temperature <= 0:
        return 0.0, placeholder(mx.float32)
    if uniforms is None:
        raise ValueError("`uniforms` is None but is required when `temperature` is above 0.")
    return float(temperature), uniforms


def output_spec(candidates: mx.array) -> dict[str, list]:
    """Return the shapes and dtypes of a :class:`Walk`, as a launch takes them."""
    B, L, K = candidates.shape
    return {
        "output_shapes": [(B, L), (B, L), (B, L, K)],
        "output_dtypes": [candidates.dtype, mx.uint32, mx.float32],
    }


def path_walk_kernel(
    scores: mx.array, candidates: mx.array, temperature: float = 0, uniforms: mx.array | None = None
) -> Walk:
    """Compute :func:`path_walk_ops` in one launch. NaN counts as -infinity."""
    B, _, K = candidates.shape
    names = ("scores", "candidates", "temperature", "uniforms")
    outputs = LIBRARY.kernel("path_walk", names, Walk._fields, HEADERS)(
        inputs=[scores, candidates, *drawing_inputs(temperature, uniforms)],
        template=[("K", K), ("SAMPLED", temperature > 0)],
        grid=(32, B, 1),
        threadgroup=(32, 1, 1),
        **output_spec(candidates),
    )
    return Walk(*outputs)


def _probe(
    scores: mx.array, candidates: mx.array, temperature: float = 0, uniforms: mx.array | None = None
) -> Probe | None:
    K, dtype = candidates.shape[-1], candidates.dtype
    if K > MAX_K or candidates.size == 0:
        return None

    def example() -> tuple:
        ids = mx.arange(2 * K).reshape(1, 2, K).astype(dtype)
        return pattern((1, 2, K, K)), ids, temperature, mx.array([[0.3, 0.7]])

    return Probe((K, dtype, temperature > 0), example)


path_walk = Op(path_walk_kernel, path_walk_ops, _probe)
