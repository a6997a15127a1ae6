"""End all ranks of a distributed run when one of them has ended: none waits for it in vain."""

import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType

from ..ranks import Ranks

BEAT = 1.0
# A rank that says nothing for so long has died, or its machine has.
SILENCE = 6.0
# An error of this rank's own is told rather than another one's.
GRACE = 1.0
_END, _FAIL = "end", "fail "


class Watch:
    """Tells the other ranks how this one ends, and ends this one when another fails.

    Each rank has a connection to rank 0, beside those of MLX, on which it says every second that
    it lives. A collective that waits for a dead rank cannot be interrupted, so the process exits.

    Args:
        ranks (Ranks): All of them have to make one at the same time.

    Raises:
        ValueError: if a rank cannot reach rank 0.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        # The interpreter's own, as the command's may be silenced.
        self._stderr, self._over = sys.stderr, False
        self._peers: dict[int, socket.socket] = {}
        self._connect()
        for rank in self._peers:
            threading.Thread(target=self._listen, args=(rank,), daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()

    def __enter__(self) -> "Watch":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, RuntimeError):
            # A collective that fails does so because of another rank, which is about to be told.
            time.sleep(2 * GRACE)
        self._over = True
        how = _END if kind is None else _FAIL + self._name(kind, error)
        self._tell(how)
        if isinstance(error, RuntimeError):
            raise ValueError(str(error)) from error

    def _name(self, kind: type[BaseException], error: BaseException | None) -> str:
        text = "interrupted" if kind is KeyboardInterrupt else " ".join(str(error).split())
        return f"rank {self.ranks.rank} of {self.ranks.size} ended: {text or kind.__name__}"

    def _connect(self) -> None:
        server = None
        greeting: tuple[list[str], int, str] | None = None
        if self.ranks.rank == 0:
            server = socket.create_server(("", 0))
            server.settimeout(SILENCE)
            greeting = (_addresses(), server.getsockname()[1], secrets.token_hex(16))
        addresses, port, token = self.ranks.share(greeting)
        if server is None:
            self._peers[0] = _reach(addresses, port, f"{token} {self.ranks.rank}\n")
            return
        with server:
            while len(self._peers) < self.ranks.size - 1:
                try:
                    peer, _ = server.accept()
                    peer.settimeout(SILENCE)
                    word, _, rank = next(_lines(peer)).partition(" ")
                except (OSError, StopIteration) as error:
                    raise ValueError(f"A rank cannot reach rank 0: {error}") from error
                if secrets.compare_digest(word, token):
                    self._peers[int(rank)] = peer

    def _listen(self, rank: int) -> None:
        peer = self._peers[rank]
        try:
            for line in _lines(peer):
                if line == _END:
                    return
                if line.startswith(_FAIL):
                    self._fail(line.removeprefix(_FAIL))
            reason = "ended without a word"
        except TimeoutError:
            reason = f"has said nothing for {SILENCE:g} seconds"
        except OSError as error:
            reason = f"cannot be reached: {error}"
        self._fail(f"rank {rank} of {self.ranks.size} {reason}")

    def _fail(self, reason: str) -> None:
        """Tell the others and exit, unless this rank is about to end with an error of its own."""
        self._tell(_FAIL + reason)
        time.sleep(GRACE)
        if self._over:
            # Even then a thread of MLX may keep the interpreter from its end.
            time.sleep(GRACE)
            os._exit(1)
        else:
            print(f"error: {reason}; this is rank {self.ranks.rank}.", file=self._stderr)
            self._stderr.flush()
            os._exit(1)

    def _tell(self, line: str) -> None:
        for peer in self._peers.values():
            with suppress(OSError):
                peer.sendall(f"{line}\n".encode())

    def _beat(self) -> None:
        while not self._over:
            self._tell("")
            time.sleep(BEAT)


def _lines(peer: socket.socket) -> Iterator[str]:
    """Read lines until the other end closes."""
    rest = b""
    while data := peer.recv(4096):
        *lines, rest = (rest + data).split(b"\n")
        yield from (line.decode(errors="replace") for line in lines)


def _reach(addresses: list[str], port: int, greeting: str) -> socket.socket:
    problems = []
    for address in addresses:
        try:
            peer = socket.create_connection((address, port), timeout=SILENCE / len(addresses))
            peer.settimeout(SILENCE)
            peer.sendall(greeting.encode())
            return peer
        except OSError as error:
            problems.append(f"{address}: {error}")
    raise ValueError(f"Rank 0 cannot be reached: {'; '.join(problems)}")


def _addresses() -> list[str]:
    """Addresses of this machine: those that the launcher gave its ranks come first."""
    found = []
    with suppress(KeyError, OSError, ValueError, LookupError):
        with open(os.environ["MLX_HOSTFILE"], encoding="utf-8") as hosts:
            found = [host.rpartition(":")[0] for host in json.load(hosts)[0]]
    for name in ("MLX_JACCL_COORDINATOR", "MLX_IBV_COORDINATOR"):
        if name in os.environ:
            found.append(os.environ[name].rpartition(":")[0])
    with suppress(OSError):
        found += socket.gethostbyname_ex(socket.gethostname())[2]
    return list(dict.fromkeys([*found, socket.gethostname(), "127.0.0.1"]))
