"""Server-sent events: a response that streams chunks, and closes the generation when the client leaves."""

import asyncio
import logging
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ingot.serve.engine.messages import Delta
from ingot.serve.http.errors import http_error
from ingot.serve.http.generation import Generation

log = logging.getLogger("ingot.serve")
DONE = b"data: [DONE]\n\n"


def event(content: bytes) -> bytes:
    """Return one event with a JSON text as its data."""
    return b"data: " + content + b"\n\n"


class EventWriter(Protocol):
    """Writes the events of one answer."""

    def events(self, index: int, deltas: list[Delta]) -> bytes:
        """Return the events for new deltas of the prompt number `index`."""

    def last_events(self) -> bytes:
        """Return the events after the last delta."""


class EventStream(Response):
    """Sends the events of a generation that has begun, as its deltas come.

    It waits while the client's connection is full; deltas merge then.
    An error after the first event becomes an event of its own, because the status has been sent.
    """

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, writer: EventWriter) -> None:
        self.status_code = 200
        self.background = None
        self._generation, self._writer = generation, writer
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            last = await self._send_events(send)
            await send({"type": "http.response.body", "body": last + DONE, "more_body": False})
        finally:
            self._generation.close()

    async def _send_events(self, send: Send) -> bytes:
        """Send the events of all deltas, and return those to send after them: the writer's, or one with an error."""
        events = self._writer.events
        try:
            async for index, deltas in self._generation:
                await send({"type": "http.response.body", "body": events(index, deltas), "more_body": True})
            return self._writer.last_events()
        except asyncio.CancelledError:
            raise
        except Exception as error:
            answer = http_error(error)
            if answer.status == 500:
                log.exception("a stream failed")
            return event(answer.body)
