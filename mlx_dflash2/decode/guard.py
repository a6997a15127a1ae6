"""Whether drafts are still made: a drafter that fails costs speed and nothing else."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from .stats import Stats

# What MLX raises where a device fails: anything else from our own drafter is a fault to be seen.
DEVICE_ERRORS = (MemoryError, RuntimeError)
# What a foreign drafter's step may raise without taking the target's decoding with it.
FOREIGN_ERRORS = (
    *DEVICE_ERRORS,
    ArithmeticError,
    AttributeError,
    LookupError,
    OSError,
    TypeError,
    ValueError,
)


class DraftGuard:
    """On until something stops drafting for good; the reason is said once, and in the stats.

    Args:
        stats (Stats): Where failures are counted and kept.
        own (bool): Whether the drafter is this package's :class:`Drafter`, of which only errors
            of the device are taken.
    """

    def __init__(self, stats: Stats, own: bool = False):
        self.stats, self.on = stats, True
        self._errors = DEVICE_ERRORS if own else FOREIGN_ERRORS

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run a step of the drafter: an error in it stops drafting and goes no further."""
        try:
            yield
        except self._errors as error:
            self.stats.draft_error = error
            self.fail(f"the drafter raised {type(error).__name__}: {error}")

    def check(self, finite: bool) -> None:
        """Stop drafting if a drafter's numbers overflowed."""
        if not finite:
            self.fail(
                "the drafter gave non-finite numbers, or tokens that the target does not have"
            )

    def fail(self, reason: str) -> None:
        """Count a failed step and stop."""
        self.stats.draft_failures += 1
        self.stop(reason)

    def stop(self, reason: str) -> None:
        """Make no more drafts, and say why."""
        if self.on:
            self.on, self.stats.fallback = False, reason
            warnings.warn(f"Decoding goes on without drafts: {reason}.", stacklevel=2)
