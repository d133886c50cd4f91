"""Rank 0's listening socket, at which the agents of other hosts join a mesh. Importing this imports no torch."""

import contextlib
import hmac
import logging
import socket
import threading
from collections.abc import Callable, Mapping

from ingot.runtime.ranks.hosts.frames import TOKEN_BYTES, read_exactly, set_options

log = logging.getLogger("ingot.ranks")

# An agent sends the token at once.
_TOKEN_SECONDS = 2.0
_POLL_SECONDS = 0.1


class Listener:
    """Accepts one connection of each agent, which shows the token of the mesh. Others are closed.

    address   the address of this host on which it listens, at a free port
    token     TOKEN_BYTES bytes
    port      (attribute) the port
    """

    def __init__(self, address: str, token: bytes) -> None:
        self._socket = socket.create_server((address, 0))
        self._socket.settimeout(_POLL_SECONDS)
        self.port = int(self._socket.getsockname()[1])
        self._token, self._over = token, threading.Event()

    def accept(self, waiting: Mapping[int, Callable[[socket.socket], None]]) -> None:
        """Call `waiting[index]` with the connection of each agent, in a thread that ends when all are there."""
        threading.Thread(target=self._run, args=(dict(waiting),), name="hosts join", daemon=True).start()

    def close(self) -> None:
        """Accept no more."""
        self._over.set()

    def _run(self, waiting: dict[int, Callable[[socket.socket], None]]) -> None:
        with self._socket:
            while waiting and not self._over.is_set():
                with contextlib.suppress(TimeoutError):
                    connection, (address, *_) = self._socket.accept()
                    index = self._shown(connection)
                    if index in waiting:
                        waiting.pop(index)(connection)
                    else:
                        log.warning("a connection from %s does not show the token of the mesh: closed", address)
                        connection.close()

    def _shown(self, connection: socket.socket) -> int | None:
        """Return the index of the host whose agent connects; None if it does not show the token."""
        connection.settimeout(_TOKEN_SECONDS)
        try:
            shown = read_exactly(connection, TOKEN_BYTES + 4)
        except OSError:
            return None
        if shown is None or not hmac.compare_digest(shown[:TOKEN_BYTES], self._token):
            return None
        connection.settimeout(None)
        set_options(connection)
        return int.from_bytes(shown[TOKEN_BYTES:], "little")
