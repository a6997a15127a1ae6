"""Whether drafts are still made: a drafter that fails costs speed and nothing else."""

import warnings
from contextlib import contextmanager

from .stats import Stats

# What a drafter's step may raise without taking the target's decoding with it.
DRAFT_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


class DraftGuard:
    """On until something stops drafting for good; the reason is said once, and in the stats.

    Args:
        stats (Stats): Where failures are counted.
    """

    def __init__(self, stats: Stats):
        self.stats, self.on = stats, True

    @contextmanager
    def step(self):
        """Around a step of the drafter: an error in it stops drafting and goes no further."""
        try:
            yield
        except DRAFT_ERRORS as error:
            self.fail(f"the drafter raised {type(error).__name__}: {error}")

    def check(self, finite: bool):
        """Stop drafting if a drafter's numbers overflowed."""
        if not finite:
            self.fail("the drafter gave non-finite numbers")

    def fail(self, reason: str):
        """Count a failed step and stop."""
        self.stats.draft_failures += 1
        self.stop(reason)

    def stop(self, reason: str):
        """Make no more drafts, and say why."""
        if self.on:
            self.on, self.stats.fallback = False, reason
            warnings.warn(f"Decoding goes on without drafts: {reason}.", stacklevel=2)
