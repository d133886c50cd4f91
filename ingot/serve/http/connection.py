"""Connections of clients: uvicorn's protocol with limits on the size and the time of a request's headers."""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ingot.serve.http.errors import HttpError
from ingot.serve.http.options import HttpOptions


def limited_protocol(options: HttpOptions) -> type[asyncio.Protocol]:
    """Return a protocol class that closes a connection whose client sends too long headers, or sends them too slowly.

    uvicorn itself has no such limits: httptools accepts any number of headers, and a connection that never completes
    its first request stays open.
    """

    class LimitedProtocol(HttpToolsProtocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._header_bytes = 0
            self._too_slow: asyncio.TimerHandle | None = None
            self._expect_headers()

        def connection_lost(self, exc: Exception | None) -> None:
            self._headers_came()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._too_slow is None and (self.cycle is None or self.cycle.response_complete):
                self._expect_headers()  # the next request of a connection that was kept alive
            super().data_received(data)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._header_bytes = 0

        def on_url(self, url: bytes) -> None:
            self._count(len(url))
            super().on_url(url)

        def on_header(self, name: bytes, value: bytes) -> None:
            self._count(len(name) + len(value) + 4)  # ": " and the line's end
            super().on_header(name, value)

        def on_headers_complete(self) -> None:
            self._headers_came()
            super().on_headers_complete()

        def _count(self, size: int) -> None:
            self._header_bytes += size
            if self._header_bytes > options.header_bytes:
                raise _HeadersTooLong

        def _expect_headers(self) -> None:
            self._too_slow = self.loop.call_later(options.read_seconds, self._close_slow)

        def _headers_came(self) -> None:
            if self._too_slow is not None:
                self._too_slow.cancel()
                self._too_slow = None

        def _close_slow(self) -> None:
            self._refuse(HttpError(408, f"the headers did not arrive within {options.read_seconds:g} s"))

        def send_400_response(self, msg: str) -> None:
            if self._header_bytes > options.header_bytes:
                self._refuse(
                    HttpError(431, f"the headers are too long; expected: at most {options.header_bytes} bytes")
                )
            else:
                self._refuse(HttpError(400, "this is no HTTP request"))

        def _refuse(self, error: HttpError) -> None:
            """Answer before a request is complete, and close the connection."""
            self._headers_came()
            if self.transport.is_closing():
                return
            head = f"HTTP/1.1 {error.status} {_REASONS[error.status]}\r\nContent-Type: application/json\r\n"
            length = f"Content-Length: {len(error.body)}\r\nConnection: close\r\n\r\n"
            self.transport.write((head + length).encode("ascii") + error.body)
            self.transport.close()

    return LimitedProtocol


_REASONS = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large"}


class _HeadersTooLong(Exception):
    """Raised inside a callback of the parser, which then reports an error to uvicorn."""
