"""A log of requests: one line for each, at its end."""

import logging
import time
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ingot.serve.logs import with_fields

log = logging.getLogger("ingot.requests")


class RequestLog:
    """Logs each request with its client, method, path, status, seconds and id. It logs no query, header or body.

    A stream's line follows its last event. A client that leaves before an answer has the status 499.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin, status = time.monotonic(), 499

        async def send_seen(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_seen)
        finally:
            _log(scope, status, time.monotonic() - begin)


def _log(scope: Scope, status: int, seconds: float) -> None:
    client = ":".join(map(str, scope["client"])) if scope.get("client") else "-"
    method, path = scope["method"], quote(scope["path"])
    request_id = scope.get("state", {}).get("request_id", "-")
    fields = with_fields(
        client=client, method=method, path=path, status=status, seconds=round(seconds, 6), request_id=request_id
    )
    log.info(
        '%s "%s %s HTTP/%s" %d in %.3f s, id %s',
        *(client, method, path, scope["http_version"], status, seconds, request_id),
        extra=fields,
    )
