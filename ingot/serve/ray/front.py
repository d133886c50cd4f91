"""The front of the application in Ray: takes HTTP requests, and forwards each to a replica."""

import logging
from collections.abc import AsyncIterator
from typing import Any

from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ingot.serve.http.error_forms import error_response
from ingot.serve.http.errors import HttpError
from ingot.serve.http.event_stream import DONE, event
from ingot.serve.ray.forwarded_request import ForwardedRequest, prompt_hashes
from ingot.serve.ray.model_replica import AnswerStart

log = logging.getLogger("ingot.serve")
# A request whose replica has died goes to another one, but once: it may be the reason.
_TRIES = 2


class Front:
    """Forwards requests to the replicas of `handle`.

    A request whose replica dies before the answer begins goes to another one. Otherwise its answer is 503, or the last
    event of its stream is the error.
    """

    def __init__(self, handle: DeploymentHandle) -> None:
        self._replicas = handle.options(stream=True, method_name="answer")

    async def __call__(self, request: Request) -> Response:
        """Answer an HTTP request."""
        body = await request.body()
        headers = request.scope["headers"]
        forwarded = ForwardedRequest(
            request.method,
            request.scope["path"],
            request.scope.get("root_path", ""),
            request.scope["query_string"],
            headers,
            body,
            prompt_hashes(body, headers),
        )
        for attempt in range(_TRIES):
            parts = self._replicas.remote(forwarded)
            try:
                start: AnswerStart = await anext(parts)
            except RayError as error:
                log.error("a replica has failed before its answer, at attempt %d: %s", attempt + 1, error)
                continue
            except BaseException:  # the client has left
                parts.cancel()
                raise
            response = StreamingResponse(_body(parts, start), start.status)
            response.raw_headers = [(bytes(name), bytes(value)) for name, value in start.headers]
            return response
        refused = HttpError(503, "the replica ended while the request ran", code="engine_unavailable")
        return error_response(request.scope, refused)


async def _body(parts: Any, start: AnswerStart) -> AsyncIterator[bytes]:
    """Yield the body of an answer. An error of the replica becomes the last event of a stream."""
    try:
        async for part in parts:
            yield part
    except RayError as error:
        log.error("a replica has failed during its answer: %s", error)
        kind = dict(start.headers).get(b"content-type", b"")
        if not kind.startswith(b"text/event-stream"):
            raise
        failed = HttpError(503, "the replica ended while the request ran", code="engine_unavailable")
        yield event(failed.body) + DONE
    finally:
        parts.cancel()
