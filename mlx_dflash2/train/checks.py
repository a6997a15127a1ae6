"""Options that can be told to be wrong before anything is computed."""

from argparse import Namespace
from typing import NamedTuple


class _Range(NamedTuple):
    low: float
    open: bool = False
    below: float | None = None

    def holds(self, value: float) -> bool:
        """Whether a number is in the range."""
        low = value > self.low if self.open else value >= self.low
        return low and (self.below is None or value < self.below)

    def __str__(self) -> str:
        low = f"above {self.low:g}" if self.open else f"{self.low:g} or more"
        return low if self.below is None else f"{low} and below {self.below:g}"


_COUNT, _ANY, _ABOVE = _Range(1), _Range(0), _Range(0, open=True)
_RANGES = {
    "seed": _ANY,
    "num_prompts": _COUNT,
    "own_prompts": _ANY,
    "max_tokens": _COUNT,
    "temp": _ANY,
    "data_batch_size": _COUNT,
    "max_seq_length": _Range(2),
    "block_size": _Range(2),
    "rope_theta": _Range(1, open=True),
    "gamma": _ABOVE,
    "train_block_size": _Range(2),
    "selector_weight": _ANY,
    "vocab_sample": _ANY,
    "negatives": _COUNT,
    "batch_size": _COUNT,
    "anchors": _COUNT,
    "iters": _COUNT,
    "learning_rate": _ABOVE,
    "min_learning_rate": _ANY,
    "warmup": _Range(0, below=1),
    "weight_decay": _ANY,
    "clip": _ABOVE,
    "average": _Range(0, below=1),
    "grad_accumulation_steps": _COUNT,
    "steps_per_report": _COUNT,
    "save_every": _COUNT,
    "time_limit": _ABOVE,
    "num_eval_prompts": _COUNT,
    "eval_max_tokens": _COUNT,
    "eval_temp": _ANY,
    "eval_stride": _COUNT,
}


def check_ranges(args: Namespace):
    """Refuse numbers that make no sense.

    Raises:
        ValueError: naming the option, its value and what is allowed.
    """
    for name, allowed in _RANGES.items():
        value = getattr(args, name)
        for number in value if isinstance(value, list) else [value]:
            if number is not None and not allowed.holds(number):
                raise ValueError(f"`{name}` is {number} but has to be {allowed}.")
    if not 0 < args.top_p <= 1:
        raise ValueError(f"`top_p` is {args.top_p} but has to be above 0 and at most 1.")
