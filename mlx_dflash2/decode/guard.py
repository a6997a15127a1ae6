"""Whether drafts are still made: a drafter that fails costs speed and nothing else."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from .stats import LOW_ACCEPTANCE_ROUNDS, Stats

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
        copies (bool): Whether copies go on where the drafter fails.
    """

    def __init__(self, stats: Stats, own: bool = False, copies: bool = False):
        self.stats, self.on = stats, True
        self._lost = "the drafter" if copies else "drafts"
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
        self._stop(reason, self._lost)

    def stop(self, reason: str) -> None:
        """Make no more drafts, and say why."""
        self._stop(reason, "drafts")

    def _stop(self, reason: str, lost: str) -> None:
        if self.on:
            self.on, self.stats.fallback = False, reason
            warnings.warn(f"Decoding goes on without {lost}: {reason}.", stacklevel=3)


def warn_low_acceptance(stats: Stats, before: int) -> None:
    """Warn once, in the pass that completes the number of first drafts that a judgment needs.

    Args:
        stats (Stats): With the pass counted.
        before (int): First drafts that were counted before it.
    """
    due = before < LOW_ACCEPTANCE_ROUNDS <= stats.first_drafts
    if due and (reason := stats.low_acceptance):
        warnings.warn(f"Drafts are rarely accepted: {reason}.", stacklevel=4)
