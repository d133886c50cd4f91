"""The server's end of the socket to the engine process, in an event loop."""

import asyncio
import socket
from collections.abc import Callable
from typing import cast

from ingot.serve.engine.messages import SERVER_DECODER, Frames, Message, ToServer, frame


class EngineConnection(asyncio.Protocol):
    """Sends messages, and calls `on_message` with each message of the engine. An error in `on_message`, or a damaged
    frame, closes the connection."""

    def __init__(self, on_message: Callable[[ToServer], None]) -> None:
        self._on_message = on_message
        self._frames = Frames()
        self._transport: asyncio.Transport | None = None
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @classmethod
    async def open(cls, end: socket.socket, on_message: Callable[[ToServer], None]) -> "EngineConnection":
        """Connect one end of a socket pair to the event loop."""
        end.setblocking(False)
        _, protocol = await asyncio.get_running_loop().create_connection(lambda: cls(on_message), sock=end)
        return protocol

    def send(self, message: Message) -> None:
        """Send a message. The transport keeps bytes that the socket does not accept yet."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(message))

    async def closed_within(self, seconds: float) -> bool:
        """Wait up to `seconds` until the engine closes its end. Return whether it has."""
        done, _ = await asyncio.wait([self._closed], timeout=seconds)
        return bool(done)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        for content in self._frames.split(data):
            self._on_message(SERVER_DECODER.decode(content))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._closed.done():
            self._closed.set_result(None)
