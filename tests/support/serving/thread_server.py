"""The engine and the HTTP server in threads of the test's process, for tests whose subject is no process."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from http_server import START_SECONDS, ServerClient

from ingot.serve.async_llm import AsyncLLM
from ingot.serve.engine.client import EngineLimits
from ingot.serve.engine.place import Place
from ingot.serve.engine.process import serve_connection
from ingot.serve.http.options import HttpOptions
from ingot.serve.http.server import Server


class EngineThread:
    """Serves one end of a socket pair, with the methods of a process that the engine's client calls."""

    started: ClassVar[list[EngineThread]] = []

    def __init__(self, connection: socket.socket, place: Place) -> None:
        self.place = place
        self._connection = connection.dup()
        self._thread = threading.Thread(target=serve_connection, args=(self._connection,), daemon=True)
        self._thread.start()
        self.started.append(self)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def kill(self) -> None:
        """Ends the connection, after which the thread ends."""
        with contextlib.suppress(OSError):  # it has ended
            self._connection.shutdown(socket.SHUT_RDWR)

    def wait(self) -> None:
        self._thread.join()
        self._connection.close()


class _Server(Server):
    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        """Signals belong to the main thread."""
        return contextlib.nullcontext()


class ThreadServer(ServerClient):
    """A server on a Unix socket, or with `tcp` on a port of the loopback address, which browsers need. `options` are
    fields of HttpOptions, arguments of AsyncLLM, `tracer_provider`, and AdminOptions `admin`.

    The engine is one of the class that `start_process` has been patched with.
    """

    def __init__(self, artifact: Path, folder: Path, *, tcp: bool = False, **options: Any) -> None:
        named = {name: options.pop(name) for name in [*options] if name in HttpOptions.__dataclass_fields__}
        provider, admin = options.pop("tracer_provider", None), options.pop("admin", None)
        self._llm = AsyncLLM(artifact, limits=options.pop("limits", EngineLimits()), **options)
        uds = None if tcp else folder / "socket"
        http = HttpOptions(**{"model_names": ("tiny",), "uds": uds, **named})
        self._server = _Server(self._llm, http, admin, provider)
        self._listening = socket.socket(socket.AF_INET if tcp else socket.AF_UNIX)
        self._listening.bind(("127.0.0.1", 0) if tcp else str(uds))
        self._listening.listen(100)
        url = f"http://127.0.0.1:{self._listening.getsockname()[1]}" if tcp else f"unix:{uds}"
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._server.serve_until_signal(self._listening)), name="server", daemon=True
        )
        self._thread.start()
        deadline = time.monotonic() + START_SECONDS
        while self._llm.engine.state == "starting" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert self._llm.engine.state == "ready"
        super().__init__(url)

    def drain(self) -> None:
        """What the server does at SIGTERM."""
        self._server.handle_exit(signal.SIGTERM, None)

    def serves(self) -> bool:
        """Whether the server still runs, after up to ten seconds in which it may end."""
        self._thread.join(10)
        return self._thread.is_alive()

    def close(self) -> None:
        self.http.close()
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(60)
        self._listening.close()


@contextlib.contextmanager
def thread_server(artifact: Path, folder: Path, **options: Any) -> Iterator[ThreadServer]:
    """A ThreadServer until the end of the block."""
    server = ThreadServer(artifact, folder, **options)
    try:
        yield server
    finally:
        server.close()


def connected(server: ServerClient) -> socket.socket:
    """A connection to a server, for tests that send bytes."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(10)
    connection.connect(server.url.removeprefix("unix:"))
    return connection
