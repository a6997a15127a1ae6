"""Times of a round by phase, for whoever wants to know; decoding itself runs without a clock."""

import time
from typing import Any

import mlx.core as mx

DRAFT, SELECT, VERIFY, ACCEPT, HOST = "draft", "select", "verify", "accept/rollback", "host"
PHASES = (DRAFT, SELECT, VERIFY, ACCEPT, HOST)


class Clock:
    """Seconds by phase; a lap waits for the phase's results, which takes away all overlap.

    Attributes:
        seconds (dict): Seconds for each of :data:`PHASES`.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all laps and start the first one."""
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._start = time.perf_counter()

    def lap(self, phase: str, *results: Any) -> None:
        """Wait for results, and count the time since the last lap to a phase."""
        mx.eval(results)
        now = time.perf_counter()
        self.seconds[phase] += now - self._start
        self._start = now
