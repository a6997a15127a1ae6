"""Costs of a drafter's rows, and the weight of each row of a block."""

import mlx.core as mx
import mlx.nn as nn


def position_weights(length: int, gamma: float) -> mx.array:
    """Compute exp(-(j - 1) / gamma) for the rows j = 1 to ``length`` after the anchor."""
    return mx.exp(-mx.arange(length) / gamma)


def d_pace_weights(right: mx.array, valid: mx.array, smoothing: float = 0.5) -> mx.array:
    """Weigh each row by the expected acceptance that depends on it (D-PACE).

    With s_j = (1 - a) c_j + a, the weight of row j is the sum over i >= j of s_1 ... s_i.

    Args:
        right (mx.array): c, the probability of the true token, [..., L].
        valid (mx.array): Booleans [..., L]; the others have s = 1 and weight 0.
        smoothing (float): a. Default: ``0.5``.

    Returns:
        mx.array: [..., L], without a gradient.
    """
    s = mx.where(valid, (1 - smoothing) * right + smoothing, 1.0)
    prefix = mx.where(valid, mx.cumprod(s, axis=-1), 0.0)
    weights = mx.cumsum(prefix, axis=-1, reverse=True)
    return mx.stop_gradient(mx.where(valid, weights, 0.0))


def unary_loss(
    kind: str, draft: mx.array, target: mx.array | None, label: mx.array
) -> tuple[mx.array, mx.array]:
    """Compute the cost of each row, and its cross entropy with the true token.

    ``ce`` is the cross entropy with the wanted distribution, ``kl`` the divergence from it, and
    ``tv`` is 0.1 cross entropy + 0.9 total variation. ``lk`` is s divergence + (1 - s) total
    variation with s = exp(-3 a), where a = sum(min(p, q)) is the row's acceptance.

    Args:
        kind (str): One of :data:`~mlx_dflash2.train.options.LOSSES`.
        draft (mx.array): Log probabilities [M, C], finite.
        target (mx.array, optional): Wanted log probabilities [M, C], which may sum to less than
            one; ``None`` wants the true token alone.
        label (mx.array): Columns [M] of the true tokens.

    Returns:
        tuple of mx.array: Cost and cross entropy, [M] each.
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
    """Compute the cost of each row's choice among its candidates.

    Args:
        scores (mx.array): Unary and pair score together, [M, K].
        is_label (mx.array): Booleans [M, K]; a row without any costs 0 with hard labels.
        wanted (mx.array, optional): The target's probabilities [M, K] of the candidates; ``None``
            wants the true token alone.

    Returns:
        tuple of mx.array: The cost, and the log probability of the true token, [M] each.
    """
    logs = nn.log_softmax(scores)
    hard = mx.where(is_label, logs, 0.0).sum(axis=-1)
    if wanted is None:
        return -hard, hard
    return -(wanted * logs).sum(axis=-1), hard


def weighted_mean(costs: mx.array, weights: mx.array) -> mx.array:
    """Divide the sum of weighted costs by the sum of weights; 0 if nothing counts."""
    return (costs * weights).sum() / mx.maximum(weights.sum(), 1e-6)
