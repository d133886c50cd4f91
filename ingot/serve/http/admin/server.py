"""The operators' server: a second socket in the event loop of the first."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from ingot.serve.engine.operator import Operator
from ingot.serve.http.admin import routes
from ingot.serve.http.admin.options import AdminOptions
from ingot.serve.http.app import add_error_handlers
from ingot.serve.http.connection import limited_protocol
from ingot.serve.http.guard import Guard
from ingot.serve.http.listening import address_of, listening
from ingot.serve.http.options import HttpOptions
from ingot.serve.http.serving import Serving

log = logging.getLogger("ingot.serve")
_OWNER_ONLY = 0o600


def make_admin_app(serving: Serving, admin: AdminOptions) -> ASGIApp:
    """Return the application of the operators' routes."""
    app = FastAPI(title="Ingot's operators", docs_url=None, redoc_url=None, openapi_url=None)
    llm = serving.llm
    app.state.operator = Operator(llm.engine, llm.model.artifact, admin.profile_dir)
    app.include_router(routes.router)
    add_error_handlers(app)
    return Guard(app, admin.http_options(serving.options))


@contextlib.asynccontextmanager
async def admin_server(serving: Serving, admin: AdminOptions) -> AsyncIterator[None]:
    """Serve the operators' routes inside the block, if the options have a socket for them. Raises OptionError if the
    socket cannot listen."""
    if not admin.listens:
        yield
        return
    options = admin.http_options(serving.options)
    hint = "choose another --admin-uds, --admin-host or --admin-port"
    with listening(options, mode=_OWNER_ONLY if admin.uds is not None else None, hint=hint) as socket:
        server = _Server(make_admin_app(serving, admin), options)
        running = asyncio.create_task(server.serve(sockets=[socket]))
        log.info("operators: %s", address_of(options, socket))
        try:
            yield
        finally:
            server.should_exit = server.force_exit = True
            await running


class _Server(uvicorn.Server):
    """A server that leaves signals to the clients' server, whose end ends it."""

    def __init__(self, app: ASGIApp, options: HttpOptions) -> None:
        config = uvicorn.Config(
            app,
            http=limited_protocol(options),
            ws="none",
            lifespan="off",
            log_level="warning",
            log_config=None,
            access_log=options.access_log,
            server_header=False,
        )
        super().__init__(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
