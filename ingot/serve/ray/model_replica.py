"""A replica in Ray: Ingot's server without a socket, on the GPU or the cores that Ray has given it."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message

from ingot.ir.errors import EngineDeadError
from ingot.serve.async_llm import AsyncLLM
from ingot.serve.engine.client import EngineLimits
from ingot.serve.http.app import make_app
from ingot.serve.http.options import HttpOptions
from ingot.serve.ray.forwarded_request import ForwardedRequest, Headers


@dataclass(frozen=True)
class AnswerStart:
    """The status and the headers of an answer. Its body follows, as bytes."""

    status: int
    headers: Headers


class ModelReplica:
    """Serves a model: an engine process, and the routes of `ingot serve`.

    model     an artifact or a checkpoint, as for `AsyncLLM`
    options   of the routes; `llm_options` are the keyword arguments of `AsyncLLM`
    """

    def __init__(self, model: str, options: HttpOptions, max_queue: int, llm_options: dict[str, Any]) -> None:
        self._llm = AsyncLLM(model, limits=EngineLimits(max_waiting=max_queue), **llm_options)
        self._app, _ = make_app(self._llm, options)

    async def reconfigure(self, user_config: object) -> None:
        """Start the engine. Ray calls this once before it sends requests, with more time than a health check has.
        Raises IngotError if it cannot start."""
        await self._llm.start()

    async def check_health(self) -> None:
        """Raise EngineDeadError if the engine is not started again, so that Ray replaces this replica."""
        if self._llm.engine.state == "dead":
            raise EngineDeadError("the engine died too often", hint="the log of the replica says why")

    async def answer(self, request: ForwardedRequest) -> AsyncIterator[AnswerStart | bytes]:
        """Yield the start of the answer, then its body in pieces. A caller that leaves aborts the request."""
        async for part in answer_parts(self._app, request):
            yield part


async def answer_parts(app: ASGIApp, request: ForwardedRequest) -> AsyncIterator[AnswerStart | bytes]:
    """Call an application with a request, and yield the parts of its answer. Pieces of the body that the caller has not
    taken yet are joined."""
    parts: asyncio.Queue[Message | None] = asyncio.Queue()
    left = asyncio.Event()
    bodies = iter((request.body,))

    async def receive() -> Message:
        for body in bodies:
            return {"type": "http.request", "body": body, "more_body": False}
        await left.wait()
        return {"type": "http.disconnect"}

    async def run() -> None:
        try:
            await app(_scope(request), receive, parts.put)
        finally:
            parts.put_nowait(None)

    running = asyncio.create_task(run())
    try:
        open_ = True
        while open_:
            waiting = [await parts.get()]
            while not parts.empty():
                waiting.append(parts.get_nowait())
            body = b""
            for part in waiting:
                if part is None:
                    open_ = False
                elif part["type"] == "http.response.start":
                    yield AnswerStart(part["status"], part["headers"])
                else:
                    body += part.get("body", b"")
            if body:
                yield body
        await running
    finally:
        left.set()
        running.cancel()


def _scope(request: ForwardedRequest) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": request.path,
        "raw_path": request.path.encode("utf-8"),
        "query_string": request.query,
        "root_path": request.root_path,
        "headers": request.headers,
        "client": None,
        "server": None,
        "state": {},
    }
