"""The engine's end of the socket to the server process. A step waits neither for messages nor for their sending."""

import os
import select
import socket
import weakref
from collections import deque

from ingot.serve.engine.messages import ENGINE_DECODER, Frames, Message, ToEngine, frame

# Above this, sending waits for the server. A step of 512 sequences sends 20 kB: the server is then 800 steps late.
MAX_UNSENT_BYTES = 16 << 20
_PIECE_BYTES = 1 << 18


class ServerGone(Exception):
    """Raised when the server process has closed its end of the socket."""


class Channel:
    """Receives messages without waiting, and sends frames without waiting unless too many bytes are unsent."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._frames = Frames()
        self._received: deque[ToEngine] = deque()
        self._unsent = bytearray()
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._wakeup)  # not before: a thread that may still call `wake` has `self`
        self._poll.register(self._wakeup, select.POLLIN)

    def receive(self, *, wait: bool) -> list[ToEngine]:
        """Return the server's messages that have arrived. With `wait`, wait until there is one, or until `wake` is
        called. Raises ServerGone."""
        self._flush()
        while True:
            try:
                while piece := self._socket.recv(_PIECE_BYTES):
                    self._received += map(ENGINE_DECODER.decode, self._frames.split(piece))
                    if len(piece) < _PIECE_BYTES:
                        break
                else:
                    raise ServerGone
            except BlockingIOError:
                pass
            except ConnectionError:
                raise ServerGone from None
            if self._received or not wait or self._was_woken():
                messages = list(self._received)
                self._received.clear()
                return messages
            self._wait(select.POLLIN | (select.POLLOUT if self._unsent else 0))

    def send(self, message: Message) -> None:
        """Send a message, or keep it until the socket accepts it. Raises ServerGone."""
        self._unsent += frame(message)
        self._flush()
        while len(self._unsent) > MAX_UNSENT_BYTES:
            self._wait(select.POLLOUT)

    def wake(self) -> None:
        """End the wait of `receive`, which another thread has called, or else its next one."""
        os.eventfd_write(self._wakeup, 1)

    def _was_woken(self) -> bool:
        try:
            return os.eventfd_read(self._wakeup) > 0
        except BlockingIOError:
            return False

    def close(self) -> None:
        """Send all messages that are kept, and close the socket. Raises ServerGone."""
        while self._unsent:
            self._wait(select.POLLOUT)
        self._socket.close()

    def _flush(self) -> None:
        try:
            while self._unsent:
                sent = self._socket.send(self._unsent)
                del self._unsent[:sent]
        except BlockingIOError:
            pass
        except ConnectionError:
            raise ServerGone from None

    def _wait(self, events: int) -> None:
        """Wait until one of the poll events happens, then send bytes that are kept."""
        self._poll.modify(self._socket, events)
        self._poll.poll()
        self._flush()
