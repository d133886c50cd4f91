"""Requests to the server's routes without a socket."""

import asyncio
import secrets
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message

from ingot.serve.batch.lines import RouteAnswer


async def post(app: ASGIApp, path: str, body: dict[str, Any]) -> RouteAnswer:
    """Call a route of an application with a JSON body, and return its whole answer."""
    request_id = secrets.token_hex(16)
    content = msgspec.json.encode(body)
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode("ascii"),
        "query_string": b"",
        "root_path": "",
        "headers": [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(content)).encode("ascii")),
            (b"x-request-id", request_id.encode("ascii")),
        ],
        "client": None,
        "server": None,
    }
    received = False
    status = 500
    pieces: list[bytes] = []

    async def receive() -> Message:
        nonlocal received
        if received:
            await asyncio.Event().wait()  # this client never leaves
        received = True
        return {"type": "http.request", "body": content, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            pieces.append(message.get("body", b""))

    await app(scope, receive, send)
    # All routes that take a POST answer with JSON. A batch file has one line for each answer.
    return RouteAnswer(status, request_id, msgspec.Raw(msgspec.json.format(b"".join(pieces) or b"null", indent=-1)))
