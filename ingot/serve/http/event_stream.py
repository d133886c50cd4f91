"""Server-sent events: a response that streams chunks, and closes the generation when the client leaves."""

import asyncio
import logging
from collections.abc import AsyncIterator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ingot.serve.http.errors import http_error
from ingot.serve.http.generation import Generation

log = logging.getLogger("ingot.serve")
DONE = b"data: [DONE]\n\n"


def event(content: bytes) -> bytes:
    """Return one event with a JSON text as its data."""
    return b"data: " + content + b"\n\n"


class EventStream(Response):
    """Sends the events of `events` as they come. It waits while the client's connection is full; deltas merge then.

    An error after the first event becomes an event of its own, because the status has been sent.
    """

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, events: AsyncIterator[bytes]) -> None:
        self.status_code = 200
        self.background = None
        self._generation, self._events = generation, events
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async with self._generation.closed_if_left(receive):
                async for one in self._caught():
                    await send({"type": "http.response.body", "body": one, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._generation.close()

    async def _caught(self) -> AsyncIterator[bytes]:
        try:
            async for one in self._events:
                yield one
        except asyncio.CancelledError:
            raise
        except Exception as error:
            answer = http_error(error)
            if answer.status == 500:
                log.exception("a stream failed")
            yield event(answer.body)
        yield DONE
