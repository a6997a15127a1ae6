"""A progress bar on a terminal, and a line now and then elsewhere."""

import sys
import time
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

INTERVAL = 10


class Progress(tqdm):
    """A bar on stderr; a line every ten seconds where stderr is not a terminal.

    Args:
        iterable (iterable, optional): What to count, as for ``tqdm``.
        kwargs: As for ``tqdm``.
    """

    def __init__(self, iterable: Iterable[Any] | None = None, **kwargs: Any) -> None:
        self.prints_lines = not sys.stderr.isatty()
        self._printed = time.monotonic()
        # Whether the last state stays to be read.
        self._stays = kwargs.get("leave", True)
        if self.prints_lines:
            kwargs |= {"mininterval": INTERVAL, "delay": INTERVAL, "leave": False}
        super().__init__(iterable, file=sys.stderr, **kwargs)

    def display(self, msg: str | None = None, pos: int | None = None) -> Any:
        """Show the bar, or print a line if the last one is old enough."""
        if not self.prints_lines:
            return super().display(msg, pos)
        if msg is None and time.monotonic() - self._printed >= INTERVAL:
            print(self, file=self.fp, flush=True)
            self._printed = time.monotonic()
        # True would make `close` write a carriage return.
        return False

    def close(self) -> None:
        """Take the bar away, or leave its last state, as a line where lines are printed."""
        if self.prints_lines and self._stays and not self.disable:
            print(self, file=self.fp, flush=True)
        super().close()

    def clear(self, nolock: bool = False) -> None:
        """Take the bar away for a moment; lines stay."""
        if not self.prints_lines:
            super().clear(nolock)
