"""What a drafter's rows cost, and how much each row of a block counts."""

import mlx.core as mx

LOSSES = ("ce", "kl", "tv", "lk")


def position_weights(length: int, gamma: float) -> mx.array:
    """exp(-(j - 1) / gamma) for the rows j = 1 to ``length`` after the anchor."""
    return mx.exp(-mx.arange(length) / gamma)


def d_pace_weights(right: mx.array, valid: mx.array, smoothing: float = 0.5) -> mx.array:
    """How much of the expected acceptance hangs on each row (D-PACE).

    With s_j = (1 - a) c_j + a, the weight of row j is the sum over i >= j of s_1 ... s_i.

    Args:
        right (mx.array): c, the probability of the true token, [..., L].
        valid (mx.array): Booleans [..., L]; other rows pass the product on and count nothing.
        smoothing (float): a. Default: ``0.5``.
    """
    s = mx.where(valid, (1 - smoothing) * right + smoothing, 1.0)
    prefix = mx.where(valid, mx.cumprod(s, axis=-1), 0.0)
    weights = mx.cumsum(prefix, axis=-1, reverse=True)
    return mx.stop_gradient(mx.where(valid, weights, 0.0))


def unary_loss(
    kind: str, draft: mx.array, target: mx.array | None, label: mx.array
) -> tuple[mx.array, mx.array]:
    """Cost of each row, and its cross entropy with the true token.

    ``ce`` is the cross entropy with what is wanted, ``kl`` the divergence from it, ``tv``
    0.1 cross entropy + 0.9 total variation, and ``lk`` a mix of divergence and total variation
    that goes from the first to the second as exp(-3 a), where a = sum(min(p, q)) is the row's
    acceptance.

    Args:
        kind (str): One of ``LOSSES``.
        draft (mx.array): Log probabilities [M, C], finite.
        target (mx.array, optional): Those wanted, which may sum to less than one; ``None`` wants
            the true token alone.
        label (mx.array): Columns [M] of the true tokens.
    """
    hard = -mx.take_along_axis(draft, label[:, None], axis=-1)[:, 0]
    if target is None:
        cross, divergence, variation = hard, hard, 1 - mx.exp(-hard)
    else:
        wanted = mx.exp(target)
        cross = -(wanted * draft).sum(axis=-1)
        divergence = cross + (wanted * target).sum(axis=-1)
        # What the target gives to ids that have no column, the drafter never gives.
        beyond = mx.maximum(0.0, 1 - wanted.sum(axis=-1))
        variation = 0.5 * (mx.abs(wanted - mx.exp(draft)).sum(axis=-1) + beyond)
    if kind == "ce":
        return cross, hard
    if kind == "kl":
        return divergence, hard
    if kind == "tv":
        return 0.1 * cross + 0.9 * variation, hard
    share = mx.stop_gradient(mx.exp(-3 * (1 - variation)))
    return share * divergence + (1 - share) * variation, hard


def selector_loss(
    scores: mx.array, is_label: mx.array, wanted: mx.array | None
) -> tuple[mx.array, mx.array]:
    """Cost of each row's choice among its candidates, and the log probability of the true one.

    Args:
        scores (mx.array): [M, K], unary and pair score together.
        is_label (mx.array): Booleans [M, K]; a row with none costs nothing with hard labels.
        wanted (mx.array, optional): The target's probabilities [M, K] of the candidates; ``None``
            wants the true token alone.
    """
    logs = scores - mx.logsumexp(scores, axis=-1, keepdims=True)
    hard = mx.where(is_label, logs, 0.0).sum(axis=-1)
    if wanted is None:
        return -hard, hard
    return -(wanted * logs).sum(axis=-1), hard


def weighted_mean(costs: mx.array, weights: mx.array) -> mx.array:
    """Sum of weighted costs over the sum of weights; 0 if nothing counts."""
    return (costs * weights).sum() / mx.maximum(weights.sum(), 1e-6)
