"""Who may talk to the server: keys, hosts and origins."""

import hmac
import ipaddress
import socket
from collections.abc import Iterable
from email.message import Message

from .errors import ApiError

ANY = "*"


class Access:
    """Decides by a request's headers whether it is let in.

    A web page that a user opens can send requests to a local server, under the page's own origin
    or, with a name of its own that it points at this machine, under that name as the host.

    Args:
        host (str): Where the server listens.
        api_key (str, optional): What requests have to bring. Default: ``None``, nothing.
        allowed_origins (iterable of str): Origins of web pages; ``*`` allows all.
        allowed_hosts (iterable of str): More names of this server; ``*`` allows all.
    """

    def __init__(
        self,
        host: str,
        api_key: str | None = None,
        allowed_origins: Iterable[str] = (),
        allowed_hosts: Iterable[str] = (),
    ):
        self.api_key = None if api_key is None else api_key.encode()
        self.allowed_origins = frozenset(allowed_origins)
        name = socket.gethostname()
        own = ("localhost", host, name, f"{name}.local", *allowed_hosts)
        self.hosts = frozenset(name.lower() for name in own)

    def check(self, headers: Message, needs_key: bool) -> None:
        """Let a request in.

        Raises:
            ApiError: if its host, its origin or its key is not right.
        """
        host = host_name(headers.get("Host") or "localhost")
        if ANY not in self.hosts and host not in self.hosts and not _is_address(host):
            raise ApiError(403, "The host of the request is not this server; see --allowed-hosts.")
        origin = headers.get("Origin")
        if origin is not None and not self.allows_origin(origin):
            raise ApiError(403, "The origin of the request is not allowed; see --allowed-origins.")
        if needs_key and self.api_key is not None:
            self._check_key(headers.get("Authorization") or "")

    def allows_origin(self, origin: str) -> bool:
        """Whether pages of an origin may use the server."""
        return ANY in self.allowed_origins or origin in self.allowed_origins

    def _check_key(self, authorization: str) -> None:
        scheme, _, key = authorization.partition(" ")
        # Bytes: the comparison takes no other text than ASCII.
        given = key.strip().encode(errors="replace")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given, self.api_key or b""):
            raise ApiError(
                401,
                "The API key is missing or wrong.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )


def host_name(header: str) -> str:
    """The name or address in a ``Host`` header, without its port."""
    header = header.strip().lower()
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0].rstrip(".")


def _is_address(host: str) -> bool:
    """Whether it is an address: no name can be pointed at another machine's."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
