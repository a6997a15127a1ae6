"""Sampling as mlx-lm defines it, with the distribution in the open.

mlx-lm's samplers are closures that only draw. Rejection sampling also needs the probabilities
that a draw follows, so :class:`Sampling` holds the same settings and gives both.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
from mlx_lm import sample_utils
from mlx_lm.sample_utils import LogitsProcessor, apply_min_p, apply_top_k

from ..kernels import top_p


@dataclass(frozen=True)
class Sampling:
    """Settings of a sampler; calling it draws exactly as mlx-lm's sampler of the same settings.

    Raises:
        ValueError: if a setting is out of its range, in one line.
    """

    temp: float = 0.0
    top_p: float = 0.0
    min_p: float = 0.0
    min_tokens_to_keep: int = 1
    top_k: int = 0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    xtc_special_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, low, high in (
            ("temp", 0.0, float("inf")),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("min_tokens_to_keep", 1, float("inf")),
            ("top_k", 0, float("inf")),
            ("xtc_probability", 0.0, 1.0),
            ("xtc_threshold", 0.0, 0.5),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"`{name}` is {value} but has to be from {low} to {high}.")
            if type(low) is int and not isinstance(value, int):
                raise ValueError(f"`{name}` is {value} but has to be an integer.")

    def __call__(self, logprobs: mx.array) -> mx.array:
        settings = asdict(self) | {"xtc_special_tokens": list(self.xtc_special_tokens)}
        return sample_utils.make_sampler(**settings)(logprobs)

    def probs(self, logprobs: mx.array, key: mx.array) -> mx.array:
        """Return the distribution that a draw from each row follows.

        Args:
            logprobs (mx.array): Rows [N, V] of log probabilities.
            key (mx.array): For XTC, which decides by chance, for each row, whether it applies.

        Returns:
            mx.array: Probabilities [N, V], float32. The filters and their order are mlx-lm's.
        """
        if 0 < self.top_p < 1.0:
            logprobs = top_p(logprobs, self.top_p)
        if self.min_p != 0.0:
            logprobs = apply_min_p(logprobs, self.min_p, self.min_tokens_to_keep)
        if self.xtc_probability > 0.0:
            logprobs = self._apply_xtc(logprobs, key)
        if self.top_k > 0:
            logprobs = apply_top_k(logprobs, self.top_k)
        logits = (logprobs * (1.0 / self.temp)).astype(mx.float32)
        return mx.softmax(logits, axis=-1, precise=True)

    def _apply_xtc(self, logprobs: mx.array, key: mx.array) -> mx.array:
        # mlx-lm's own function decides once for all rows, and from the global random state.
        probs = mx.softmax(logprobs, axis=-1)
        least = mx.where(probs > self.xtc_threshold, probs, mx.inf).min(axis=-1, keepdims=True)
        mask = probs > least
        if self.xtc_special_tokens:
            mask[..., list(self.xtc_special_tokens)] = False
        chance = mx.random.uniform(shape=(logprobs.shape[0], 1), key=key)
        return mx.where((chance <= self.xtc_probability) & mask, -mx.inf, logprobs)


def make_sampler(
    temp: float = 0.0,
    top_p: float = 0.0,
    min_p: float = 0.0,
    min_tokens_to_keep: int = 1,
    top_k: int = 0,
    xtc_probability: float = 0.0,
    xtc_threshold: float = 0.1,
    xtc_special_tokens: Sequence[int] | None = None,
) -> Sampling:
    """Make a sampler with the arguments of :func:`mlx_lm.sample_utils.make_sampler`.

    Raises:
        ValueError: if a setting is out of its range, in one line.
    """
    return Sampling(
        temp,
        top_p,
        min_p,
        min_tokens_to_keep,
        top_k,
        xtc_probability,
        xtc_threshold,
        tuple(xtc_special_tokens or ()),
    )


def check_seed(seed: int | None) -> None:
    """Refuse a seed that MLX's generator does not take.

    Raises:
        ValueError: in one line.
    """
    if seed is not None and not 0 <= seed < 2**64:
        raise ValueError(f"`seed` is {seed} but has to be from 0 to 2**64 - 1.")


@dataclass(frozen=True)
class PureProcessor:
    """A logits processor that depends on nothing but its arguments.

    It may be called for rows that are never emitted, so a whole block is judged in one go. Wrap
    a processor of your own in it only if it keeps no count and no state. ``ids`` are tokens that
    it names, so that those which the target does not have are refused.
    """

    function: LogitsProcessor
    ids: tuple[int, ...] = ()

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        return self.function(tokens, logits)


def make_logits_processors(
    logit_bias: dict[int, float] | None = None, *args: Any, **kwargs: Any
) -> list[Callable]:
    """Make the processors of :func:`mlx_lm.sample_utils.make_logits_processors`, marked as pure."""
    made = sample_utils.make_logits_processors(logit_bias, *args, **kwargs)
    # The bias comes first where there is one.
    ids = [tuple(logit_bias or ())] + [()] * len(made)
    return [PureProcessor(p, named) for p, named in zip(made, ids, strict=False)]
