"""Answers and their streams of server-sent events, which close the generation when they end."""

import asyncio
import logging
from abc import ABC, abstractmethod
from typing import Any, ClassVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ingot.serve.engine.messages import Delta
from ingot.serve.http.errors import HttpError, http_error
from ingot.serve.http.generation import Generation

log = logging.getLogger("ingot.serve")
DONE = b"data: [DONE]\n\n"


def event(content: bytes) -> bytes:
    """Return one event with a JSON text as its data."""
    return b"data: " + content + b"\n\n"


class Answer(ABC):
    """The answer to one request: whole, or as the events of a stream. Errors have OpenAI's form.

    end   the bytes after the last event
    """

    end: ClassVar[bytes] = DONE

    @abstractmethod
    async def whole(self) -> Any:
        """Wait for the end of the generation, and return the answer as an object that msgspec encodes."""

    @abstractmethod
    def events(self, index: int, deltas: list[Delta]) -> bytes:
        """Return the events for new deltas of the prompt number `index`."""

    @abstractmethod
    def last_events(self) -> bytes:
        """Return the events after the last delta."""

    def error_events(self, error: HttpError) -> bytes:
        """Return the events for an error that ends the stream."""
        return event(error.body)


class EventStream(Response):
    """Sends the events of a generation that has begun, as its deltas come.

    It waits while the client's connection is full; deltas merge then.
    An error after the first event becomes an event of its own, because the status has been sent.
    """

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, answer: Answer) -> None:
        self.status_code = 200
        self.background = None
        self._generation, self._answer = generation, answer
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            last = await self._send_events(send)
            await send({"type": "http.response.body", "body": last + self._answer.end, "more_body": False})
        finally:
            self._generation.close()

    async def _send_events(self, send: Send) -> bytes:
        """Send the events of all deltas, and return those to send after them: the answer's last ones, or an error."""
        events = self._answer.events
        try:
            async for index, deltas in self._generation:
                await send({"type": "http.response.body", "body": events(index, deltas), "more_body": True})
            return self._answer.last_events()
        except asyncio.CancelledError:
            raise
        except Exception as error:
            failure = http_error(error)
            if failure.status == 500:
                log.exception("a stream failed")
            return self._answer.error_events(failure)
