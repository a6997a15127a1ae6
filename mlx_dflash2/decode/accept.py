"""Which of the drafted tokens stay, and what follows them: pure functions on the device."""

import mlx.core as mx


def accept_greedy(draft_tokens: mx.array, logprobs: mx.array) -> tuple[mx.array, mx.array]:
    """Keep drafts as long as each is the target's own best token.

    The first n tokens are the drafts that agree, the next is the bonus: the target's best token
    after them. What is emitted is therefore what the target alone would have chosen.

    Args:
        draft_tokens (mx.array): Drafts [L]; L may be 0.
        logprobs (mx.array): The target's rows [L + 1, V]; row i judges draft i, row L the bonus.

    Returns:
        tuple of mx.array: How many drafts stay, n, a scalar; and tokens [L + 1], whose first
        n + 1 are the round's.
    """
    tokens = mx.argmax(logprobs, axis=-1).astype(mx.uint32)
    return _leading(tokens[:-1] == draft_tokens), tokens


def accept_sampled(
    draft_tokens: mx.array,
    candidates: mx.array,
    q: mx.array,
    p: mx.array,
    accept_key: mx.array,
    draw_key: mx.array,
) -> tuple[mx.array, mx.array]:
    """Sample speculatively by rejection: what is emitted follows p whatever q is.

    Draft i stays with probability min(1, p_i / q_i); the token after the first rejection is
    drawn from max(p - q, 0), and after a full acceptance from p (Leviathan et al. 2023,
    algorithm 1). q is sparse: zero outside the candidates.

    Shapes:
      - draft_tokens: [L]; L may be 0
      - candidates: [L, K] ids, distinct in a row; q: [L, K] float32, what the draft was drawn from
      - p: [L + 1, V] float32, the target's distribution at each row
      - accept_key, draw_key: independent of each other and of the draft's randomness

    Returns:
        tuple of mx.array: As :func:`accept_greedy`.
    """
    L = draft_tokens.shape[0]
    if L == 0:
        return mx.array(0, mx.uint32), draw(p, draw_key)
    drafts = draft_tokens[:, None]
    p_draft = mx.take_along_axis(p[:L], drafts, axis=-1)[:, 0]
    q_draft = mx.where(candidates == drafts, q, 0.0).sum(axis=-1)
    uniforms = mx.random.uniform(shape=(L,), key=accept_key)
    num_accepted = _leading(uniforms * q_draft < p_draft)
    # The row after the accepted drafts; q is nothing at the bonus row, behind the last draft.
    row = num_accepted[None]
    p_row = mx.take(p, row, axis=0)
    last = mx.minimum(row, L - 1)
    ids = mx.take(candidates, last, axis=0)
    q_row = mx.where(row < L, mx.take(q, last, axis=0), 0.0)
    token = draw(residual(p_row, ids, q_row), draw_key)
    tokens = mx.concatenate([draft_tokens, token]).astype(mx.uint32)
    tokens = mx.where(mx.arange(L + 1) == num_accepted, token.astype(mx.uint32), tokens)
    return num_accepted, tokens


def residual(p: mx.array, candidates: mx.array, q: mx.array) -> mx.array:
    """max(p - q, 0), not normalized; p itself where nothing is left.

    Shapes:
      - p: [N, V]; candidates, q: [N, K]
    """
    left = mx.maximum(mx.take_along_axis(p, candidates, axis=-1) - q, 0.0)
    left = mx.put_along_axis(p, candidates, left, axis=-1)
    return mx.where(left.sum(axis=-1, keepdims=True) > 0, left, p)


def draw(p: mx.array, key: mx.array) -> mx.array:
    """One index [N] from each row of unnormalized probabilities [N, V], by the Gumbel trick."""
    return mx.argmax(mx.log(p) + mx.random.gumbel(p.shape, key=key), axis=-1)


def _leading(agree: mx.array) -> mx.array:
    """How many of a row of booleans [L] come before the first false one."""
    return mx.cumprod(agree.astype(mx.int32)).sum().astype(mx.uint32)
