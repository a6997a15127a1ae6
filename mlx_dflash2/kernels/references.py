"""What every op computes, in float64 NumPy and as plainly as it can be written."""

import numpy as np

# A draw this close to a step of the distribution may fall on either side in float32.
_MARGIN = 1e-5


def top_k(x: np.ndarray, k: int, multiplier: float = 1.0, softcap: float | None = None) -> tuple:
    """Values and ids of the k largest of each row; NumPy's stable sort is the rule for ties."""
    ids = np.argsort(-x, axis=-1, kind="stable")[..., :k]
    values = np.take_along_axis(x, ids, -1) * multiplier
    return (softcap * np.tanh(values / softcap) if softcap else values), ids


def pair_score(anchor, candidates, unary, gate, predecessor, successor) -> tuple:
    """Scores [B, L, K, K], one position after the other."""
    B, L, K = candidates.shape
    scores = np.zeros((B, L, K, K))
    for b, t in np.ndindex(B, L):
        before = candidates[b, t - 1] if t else np.full(K, anchor[b])
        left, right = predecessor[before] * gate[b, t], successor[candidates[b, t]]
        scores[b, t] = unary[b, t] + left @ right.T
    return (scores,)


def path_walk(scores, candidates, temperature: float = 0.0, uniforms=None) -> tuple:
    """Tokens, choices and q of the walk.

    Errors: ``ValueError`` if a draw is too close to call in float32.
    """
    B, L, K, _ = scores.shape
    choices, q = np.zeros((B, L), int), np.zeros((B, L, K))
    for b in range(B):
        choice = 0
        for t in range(L):
            row = scores[b, t, choice]
            if temperature > 0:
                weights = np.exp((row - row.max()) / temperature)
                q[b, t] = weights / weights.sum()
                steps = np.cumsum(q[b, t])
                if np.abs(steps - uniforms[b, t]).min() < _MARGIN:
                    raise ValueError("a uniform lies on a step of the distribution")
                choice = min(int((uniforms[b, t] >= steps).sum()), K - 1)
            else:
                choice = int(np.argmax(row))
                q[b, t, choice] = 1
            choices[b, t] = choice
    return np.take_along_axis(candidates, choices[..., None], -1)[..., 0], choices, q


def pair_walk(anchor, candidates, unary, gate, predecessor, successor, *drawing) -> tuple:
    """The walk through the pair scores."""
    (scores,) = pair_score(anchor, candidates, unary, gate, predecessor, successor)
    return path_walk(scores, candidates, *drawing)


def grouped_conv(x, base, dynamic, residual=None) -> tuple:
    """The convolution, one row and tap after the other."""
    B, L, H = x.shape
    K, G = dynamic.shape[2:]
    out = np.zeros((B, L, H)) if residual is None else residual.copy()
    for row in range(L):
        for tap in range(min(row, K - 1) + 1):
            weight = base[tap] + np.repeat(dynamic[:, row, tap], H // G, axis=-1)
            out[:, row] += weight * x[:, row - tap]
    return (out,)


def grouped_conv_norm(x, base, dynamic, residual, weight, eps: float) -> tuple:
    """The convolution, the residual, and the RMSNorm of their sum."""
    (total,) = grouped_conv(x, base, dynamic, residual)
    return total, total / np.sqrt((total**2).mean(-1, keepdims=True) + eps) * weight


def gated_delta_verify(q, k, v, g, beta, state, past, kept) -> tuple:
    """The kept rows of the past for the state, then the new rows for their outputs."""
    after, y = np.zeros_like(state), np.zeros_like(v)
    heads = v.shape[2] // k.shape[2]
    for b, h in np.ndindex(state.shape[:2]):
        one = state[b, h]
        for t in range(int(kept[b])):
            one = _delta_step(
                one, *(x[b, t, i] for x, i in zip(past, (h // heads, h, h, h), strict=True))
            )
        after[b, h] = one
        for t in range(q.shape[1]):
            one = _delta_step(one, k[b, t, h // heads], v[b, t, h], g[b, t, h], beta[b, t, h])
            y[b, t, h] = one @ q[b, t, h // heads]
    return y, after


def _delta_step(state, key, value, decay, beta):
    state = state * decay
    return state + np.outer((value - state @ key) * beta, key)
