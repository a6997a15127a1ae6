"""Bounds on what clients can take up: connections, waiting requests, bytes and time."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from .errors import ApiError

# The largest body of a request. A million tokens of text are a few megabytes.
MAX_BODY_BYTES = 32 * 2**20
# How long a body may take to arrive, and a write may wait for a client that does not read.
BODY_SECONDS, SOCKET_SECONDS = 60.0, 60.0
# What is read and thrown away of a request that was refused, so that its sender sees why.
LINGER_BYTES, LINGER_SECONDS = 2**31, 10.0
# Connections beside those of running and waiting requests.
SPARE_CONNECTIONS = 64
# How long requests may go on once the server has been told to stop.
DRAIN_SECONDS = 30.0


class Queue:
    """Counts the requests that are inside, and refuses those that are too many.

    Args:
        running (int): Requests that are answered at a time.
        waiting (int): Requests that may wait beside them.
    """

    def __init__(self, running: int, waiting: int):
        self.limit, self.inside, self.open = running + waiting, 0, True
        self._changed = threading.Condition()

    @contextmanager
    def place(self) -> Iterator[None]:
        """Be inside.

        Raises:
            ApiError: if there is no room, or the server stops.
        """
        with self._changed:
            if not self.open:
                raise ApiError(503, "The server is shutting down.", headers={"Retry-After": "30"})
            if self.inside >= self.limit:
                raise ApiError(
                    429,
                    f"{self.inside} requests are running or waiting; try again later.",
                    code="queue_full",
                    headers={"Retry-After": "1"},
                )
            self.inside += 1
        try:
            yield
        finally:
            with self._changed:
                self.inside -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """Let nobody in any more."""
        with self._changed:
            self.open = False

    def wait_empty(self, seconds: float) -> bool:
        """Wait until nobody is inside; false if that takes too long."""
        with self._changed:
            return self._changed.wait_for(lambda: self.inside == 0, seconds)
