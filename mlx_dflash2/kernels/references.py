"""What every op computes, in float64 NumPy and as plainly as it can be written."""

from collections.abc import Sequence

import numpy as np

# A draw this close to a step of the distribution may fall on either side in float32.
_MARGIN = 1e-5

Arrays = Sequence[np.ndarray]


def top_k(
    x: np.ndarray, k: int, multiplier: float = 1.0, softcap: float | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Find the k largest of each row; NumPy's stable sort is the rule for ties."""
    ids = np.argsort(-x, axis=-1, kind="stable")[..., :k]
    values = np.take_along_axis(x, ids, -1) * multiplier
    return (softcap * np.tanh(values / softcap) if softcap else values), ids


def pair_score(inputs: Arrays) -> tuple[np.ndarray]:
    """Score the pairs [B, L, K, K], one position after the other."""
    anchor, candidates, unary, gate, predecessor, successor = inputs
    B, L, K = candidates.shape
    last = len(predecessor) - 1
    scores = np.zeros((B, L, K, K))
    for b, t in np.ndindex(B, L):
        before = candidates[b, t - 1] if t else np.full(K, anchor[b])
        left = predecessor[np.minimum(before, last)] * gate[b, t]
        scores[b, t] = unary[b, t] + left @ successor[np.minimum(candidates[b, t], last)].T
    return (scores,)


def path_walk(
    scores: np.ndarray,
    candidates: np.ndarray,
    temperature: float = 0.0,
    uniforms: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Walk a position at a time; returns tokens, choices and q.

    Raises:
        ValueError: if a draw is too close to call in float32.
    """
    B, L, K, _ = scores.shape
    choices, q = np.zeros((B, L), int), np.zeros((B, L, K))
    for b in range(B):
        choice = 0
        for t in range(L):
            step = scores[b, t, choice]
            if uniforms is not None:
                weights = np.exp((step - step.max()) / temperature)
                q[b, t] = weights / weights.sum()
                sums = np.cumsum(q[b, t])
                if np.abs(sums - uniforms[b, t]).min() < _MARGIN:
                    raise ValueError("A uniform lies on a step of the distribution.")
                choice = min(int((uniforms[b, t] >= sums).sum()), K - 1)
            else:
                choice = int(np.argmax(step))
                q[b, t, choice] = 1
            choices[b, t] = choice
    return np.take_along_axis(candidates, choices[..., None], -1)[..., 0], choices, q


def pair_walk(
    inputs: Arrays, temperature: float = 0.0, uniforms: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Walk through the pair scores."""
    (scores,) = pair_score(inputs)
    return path_walk(scores, inputs[1], temperature, uniforms)


def grouped_conv(x: np.ndarray, base: np.ndarray, dynamic: np.ndarray) -> tuple[np.ndarray]:
    """Convolve one position and tap after the other."""
    B, L, H = x.shape
    K, G = dynamic.shape[2:]
    out = np.zeros((B, L, H))
    for t in range(L):
        for tap in range(min(t, K - 1) + 1):
            weight = base[tap] + np.repeat(dynamic[:, t, tap], H // G, axis=-1)
            out[:, t] += weight * x[:, t - tap]
    return (out,)


def grouped_conv_norm(inputs: Arrays, eps: float) -> tuple[np.ndarray, np.ndarray]:
    """Add the convolution to the residual, and norm the sum."""
    x, base, dynamic, residual, weight = inputs
    total = residual + grouped_conv(x, base, dynamic)[0]
    return total, total / np.sqrt((total**2).mean(-1, keepdims=True) + eps) * weight


def gated_delta_verify(
    q: np.ndarray, rows: Arrays, state: np.ndarray, past: Arrays, kept: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Run the kept rows of the past for the state, then the new rows for their outputs."""
    k, v, _, _ = rows
    after, y = np.zeros_like(state), np.zeros_like(v)
    share = v.shape[2] // k.shape[2]
    for b, h in np.ndindex(state.shape[:2]):
        one = state[b, h]
        for t in range(int(kept[b])):
            one = _delta_step(one, past, b, t, h, share)
        after[b, h] = one
        for t in range(q.shape[1]):
            one = _delta_step(one, rows, b, t, h, share)
            y[b, t, h] = one @ q[b, t, h // share]
    return y, after


def qmm_rows(x: np.ndarray, matrix: tuple) -> tuple[np.ndarray]:
    """Unpack the weights number by number, and multiply."""
    words, scales, biases, group_size, bits, offset = matrix
    each = 32 // bits
    q = np.stack([(words >> (bits * j)) & (2**bits - 1) for j in range(each)], axis=-1)
    q = q.reshape(len(words), -1)
    weights = q * np.repeat(scales, group_size, -1) + np.repeat(biases, group_size, -1)
    return (x @ weights.T + (0 if offset is None else offset),)


def top_p(x: np.ndarray, p: float) -> tuple[np.ndarray]:
    """Keep the numbers above which lies less than ``p`` of the sum of probabilities.

    Raises:
        ValueError: if a sum is too close to call in float32.
    """
    kept = np.empty(x.shape, bool)
    for row, stays in zip(x, kept, strict=True):
        probs, total = np.exp(row), np.exp(row).sum()
        order = np.argsort(-row, kind="stable")
        # Equal numbers have the same sum above them.
        first = np.searchsorted(-row[order], -row)
        above = (np.cumsum(probs[order]) - probs[order])[first] / total
        if np.abs(above - p).min() < _MARGIN:
            raise ValueError("A sum of probabilities lies on the limit.")
        stays[:] = above < p
    return (np.where(kept, x, -np.inf),)


def _delta_step(
    state: np.ndarray, rows: Arrays, b: int, t: int, head: int, share: int
) -> np.ndarray:
    """Write row t into the state of a head; ``share`` heads have a key in common."""
    k, v, g, beta = rows
    key = k[b, t, head // share]
    state = state * g[b, t, head]
    return state + np.outer((v[b, t, head] - state @ key) * beta[b, t, head], key)
