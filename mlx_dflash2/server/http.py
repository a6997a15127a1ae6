"""The listening socket: a thread a connection, within bounds, until it is told to stop."""

import logging
import socket
import sys
import threading
from collections.abc import Callable
from http.server import ThreadingHTTPServer
from socketserver import BaseRequestHandler
from typing import Any

_BUSY = (
    b"HTTP/1.0 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n\r\n"
    b'{"error": {"message": "There are too many connections.", "type": "server_error", '
    b'"param": null, "code": "too_many_connections"}}'
)


class Server(ThreadingHTTPServer):
    """Listens for connections.

    Args:
        host (str): Where to listen.
        port (int): The port; 0 takes a free one.
        handler (callable): Makes the handler of a connection.
        max_connections (int): More than these are turned away.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self, host: str, port: int, handler: Callable[..., BaseRequestHandler], max_connections: int
    ):
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, _, _, _, address = infos[0]
        self._places = threading.BoundedSemaphore(max_connections)
        super().__init__(address, handler)  # type: ignore[arg-type]

    @property
    def url(self) -> str:
        """Where clients find the API."""
        host, port = map(str, self.server_address[:2])
        return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a connection's thread, if there is room for one more."""
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
            return
        request.setblocking(False)
        try:
            request.send(_BUSY)
        except OSError:
            logging.info("A client was turned away and did not listen.")
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve one connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log what went wrong with a connection, unless it was only cut."""
        error = sys.exception()
        if not isinstance(error, ConnectionError | TimeoutError):
            logging.error("A connection failed.", exc_info=error)

    def start(self) -> None:
        """Accept connections, on a thread of its own."""
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def stop(self) -> None:
        """Accept no more connections."""
        self.shutdown()
        self.server_close()
