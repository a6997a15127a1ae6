"""Which of the drafted tokens stay, and what follows them: pure functions on the device."""

from typing import NamedTuple

import mlx.core as mx


class Verdict(NamedTuple):
    """``num_accepted`` n, a scalar; ``tokens`` [L + 1], whose first n + 1 are the round's."""

    num_accepted: mx.array
    tokens: mx.array


def accept_greedy(draft_tokens: mx.array, logprobs: mx.array) -> Verdict:
    """Keep drafts as long as each is the target's own best token.

    The first n tokens are the drafts that agree, the next is the bonus: the target's best token
    after them. What is emitted is therefore what the target alone would have chosen.

    Args:
        draft_tokens (mx.array): Drafts [L]; L may be 0.
        logprobs (mx.array): The target's rows [L + 1, V]; row i judges draft i, row L the bonus.
    """
    tokens = mx.argmax(logprobs, axis=-1).astype(mx.uint32)
    agree = (tokens[:-1] == draft_tokens).astype(mx.int32)
    return Verdict(mx.cumprod(agree).sum().astype(mx.uint32), tokens)
