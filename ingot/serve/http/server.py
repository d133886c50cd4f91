"""Run the HTTP server: listen, load the model, serve until a signal, drain."""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Iterator
from types import FrameType
from typing import Any

import uvicorn

from ingot.ir.errors import EngineDeadError
from ingot.serve.async_llm import AsyncLLM
from ingot.serve.garbage import keep_loaded_objects
from ingot.serve.http.admin.options import AdminOptions
from ingot.serve.http.admin.server import admin_server
from ingot.serve.http.app import make_app
from ingot.serve.http.connection import limited_protocol
from ingot.serve.http.listening import address_of, listening
from ingot.serve.http.options import HttpOptions
from ingot.serve.http.tls import tls_context
from ingot.serve.http.tracing import make_provider
from ingot.serve.logs import set_up_logs

log = logging.getLogger("ingot.serve")


def serve(llm: AsyncLLM, options: HttpOptions, admin: AdminOptions | None = None) -> None:
    """Serve a model until SIGTERM or SIGINT, then let running requests end. `admin` has the operators' socket.

    Raises OptionError if the server cannot listen, the error of the engine if it cannot start, and EngineDeadError if
    it dies too often.
    """
    set_up_logs(options.log_format)
    endpoint = options.otlp_traces_endpoint
    with (
        contextlib.nullcontext() if endpoint is None else _spans_sent(endpoint) as tracer_provider,
        listening(options) as clients,
    ):
        server = Server(llm, options, admin, tracer_provider)
        with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
            runner.run(server.serve_until_signal(clients))


class Server(uvicorn.Server):
    """The HTTP server of one model. It ends normally after a signal; uvicorn's class raises the signal again."""

    def __init__(
        self, llm: AsyncLLM, options: HttpOptions, admin: AdminOptions | None = None, tracer_provider: Any = None
    ) -> None:
        app, self._serving = make_app(llm, options, tracer_provider)
        self._admin = admin or AdminOptions()
        context = tls_context(options)
        config = uvicorn.Config(
            app,
            http=limited_protocol(options),
            ws="none",
            lifespan="off",
            root_path=options.root_path,
            ssl_context_factory=None if context is None else lambda _config, _default: context,
            log_level="warning",
            log_config=None,
            access_log=False,  # RequestLog has ids and seconds
            server_header=False,
            timeout_graceful_shutdown=options.drain_seconds,
        )
        super().__init__(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        signals = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain; a second signal ends at once."""
        self.force_exit = self.should_exit
        self.should_exit = self._serving.draining = True

    async def serve_until_signal(self, clients: socket.socket) -> None:
        """Start the engine, and serve requests from a listening socket until a signal.

        Raises the error of an engine that cannot start. If the engine dies too often, stop and raise EngineDeadError.
        """
        watching = asyncio.create_task(self._watch_engine(address_of(self._serving.options, clients)))
        try:
            async with admin_server(self._serving, self._admin):
                await self.serve(sockets=[clients])
        finally:
            if not watching.done():
                watching.cancel()
            await self._serving.llm.close()
        with contextlib.suppress(asyncio.CancelledError):
            await watching

    async def _watch_engine(self, address: str) -> None:
        """Start the engine, and end the server when it cannot start or is not started again."""
        llm = self._serving.llm
        try:
            await asyncio.gather(llm.start(), llm.prepare_chats())
            keep_loaded_objects()
            log.info("ready: %s serves %s", address, ", ".join(self._serving.options.model_names))
            while llm.engine.state != "dead":
                await llm.engine.state_change()
            raise EngineDeadError("the engine died too often", hint="the messages above say why")
        finally:
            self.should_exit = self._serving.draining = True


@contextlib.contextmanager
def _spans_sent(endpoint: str) -> Iterator[Any]:
    """Yield a provider of tracers that sends spans to `endpoint`, and send the last ones at the end."""
    provider = make_provider(endpoint)
    try:
        yield provider
    finally:
        provider.shutdown()
