"""A client's connection: bodies in, events out, and whether anybody is still there."""

import json
import select
import socket
import time
from io import BufferedIOBase
from typing import Any

from .errors import ApiError
from .limits import BODY_SECONDS, LINGER_BYTES, LINGER_SECONDS, MAX_BODY_BYTES

CHUNK = 64 * 1024


def is_gone(connection: socket.socket) -> bool:
    """Whether the client has hung up; what it has sent and nobody has read does not count."""
    poll = select.poll()
    try:
        poll.register(connection, select.POLLIN)
        return bool(poll.poll(0)) and not connection.recv(1, socket.MSG_PEEK)
    except (OSError, ValueError):
        # It was closed here, too.
        return True


def read_body(stream: BufferedIOBase, length: str | None, encoding: str | None) -> bytes:
    """The body of a request, within its bounds of size and time.

    Args:
        stream: To read from.
        length (str, optional): The ``Content-Length``.
        encoding (str, optional): The ``Transfer-Encoding``.

    Raises:
        ApiError: if there is none, or it is too long, too slow or cut short.
    """
    if encoding is not None or length is None:
        raise ApiError(411, "The request needs a Content-Length, and no Transfer-Encoding.")
    if not length.isascii() or not length.isdigit():
        raise ApiError(400, "The Content-Length is not a number.")
    size = int(length[:20])
    if size > MAX_BODY_BYTES:
        raise ApiError(413, f"The body has {size} bytes but at most {MAX_BODY_BYTES} are allowed.")
    chunks, deadline = [], time.monotonic() + BODY_SECONDS
    while size > 0:
        if time.monotonic() > deadline:
            raise ApiError(408, f"The body did not arrive within {BODY_SECONDS:.0f} seconds.")
        chunk = stream.read1(min(size, CHUNK))
        if not chunk:
            raise ApiError(400, "The body is shorter than its Content-Length.")
        chunks.append(chunk)
        size -= len(chunk)
    return b"".join(chunks)


def decode_json(body: bytes) -> Any:
    """The value that a body holds.

    Raises:
        ApiError: if it is not valid JSON, or holds text that is not valid Unicode.
    """
    try:
        value = json.loads(body.decode(), parse_constant=_refuse_constant)
        if b"\\u" in body:
            # Half of a surrogate pair can be written, but it is no text.
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ApiError(400, "The body is nested too deeply.") from error
    except UnicodeError as error:
        raise ApiError(400, "The body holds text that is not valid Unicode.") from error
    except ValueError as error:
        # The message of a JSON error names a place, but nothing of the content.
        raise ApiError(400, f"The body is not valid JSON: {error}") from error
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


def linger(connection: socket.socket) -> None:
    """Throw away what a refused client still sends: closing at once would hide the answer."""
    deadline, left = time.monotonic() + LINGER_SECONDS, LINGER_BYTES
    try:
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(1.0)
        while left > 0 and time.monotonic() < deadline:
            received = len(connection.recv(CHUNK))
            if not received:
                return
            left -= received
    except OSError:
        return
