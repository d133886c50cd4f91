"""Send requests to an OpenAI server at their arrival times, and record when the events of each came back.

    python benchmarks/http_client.py WORK --json FILE

http_load.py starts several of these processes, each with its share of the requests in WORK (`Share`, as JSON). FILE
gets an `Answer`. Connections are kept alive and are used again. It needs httptools, and of Ingot nothing.
"""

import argparse
import asyncio
import json
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httptools

_HEARTBEAT = 2e-3  # seconds between two looks at the client's own lag
_POLLED = 1.5e-3  # seconds; epoll waits whole milliseconds, rounded up
_EVENT = b"data: "
_LAST_EVENT = b"data: [DONE]"
_LONGEST_WAIT = 120.0  # seconds after the last arrival; a server that takes longer is hung


@dataclass(frozen=True)
class Share:
    """The requests of one client process, in arrival order.

    begin     the moment of arrival 0, of time.monotonic(), the clock that all processes of a machine share
    requests  for each: its index, its arrival in seconds after `begin`, and the body to send, as JSON
    """

    host: str
    port: int
    path: str
    begin: float
    requests: list[tuple[int, float, str]]


@dataclass
class Seen:
    """What came back for one request. Times are in seconds after the beginning.

    events   when each event arrived; the last one, which has the usage, and the end mark are left out
    tokens   how many tokens the usage says
    error    why it failed; "" if it did not
    """

    index: int
    sent: float
    events: list[float] = field(default_factory=list)
    tokens: int = 0
    error: str = ""


@dataclass(frozen=True)
class Answer:
    """The result of a client process. `lags` are delays of its event loop, in seconds, one for each heartbeat."""

    seen: list[Seen]
    lags: list[float]


class Connection(asyncio.Protocol):
    """One connection to the server. It serves one request after another."""

    def __init__(self, begin: float) -> None:
        self._begin = begin
        self._transport: Any = None
        self._seen = Seen(-1, 0.0)
        self._done: asyncio.Future[None] | None = None
        self._parser: Any = None
        self._last = b""  # the event that arrived last
        self._whole = b""  # the body of an error

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def send(self, seen: Seen, head: bytes, body: bytes) -> "asyncio.Future[None]":
        """Send a request, and return a future that ends with its last byte. `seen` gets what comes back."""
        self._seen, self._last, self._whole = seen, b"", b""
        self._done = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._transport.writelines([head, body])
        return self._done

    def data_received(self, data: bytes) -> None:
        if self._parser is not None:
            self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        """Note the events of a piece of the body. Servers write whole events."""
        if self._parser.get_status_code() != 200:
            self._whole += body
            return
        now = time.monotonic() - self._begin
        for event in body.split(b"\n\n"):
            if event.startswith(_EVENT) and not event.startswith(_LAST_EVENT):
                self._seen.events.append(now)
                self._last = event

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status != 200:
            self._seen.error = f"status {status}: {self._whole[:200].decode(errors='replace')}"
        else:
            usage = json.loads(self._last.removeprefix(_EVENT) or b"{}").get("usage")
            self._seen.tokens = usage["completion_tokens"] if usage else 0
            self._seen.error = "" if usage else "the stream ended without its usage"
            self._seen.events = self._seen.events[:-1]
        self._end()

    def connection_lost(self, error: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._seen.error = f"the connection was lost: {error}"
            self._end()

    def _end(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)
        self._parser = None


class Client:
    """Sends the requests of a share, each at its time."""

    def __init__(self, share: Share) -> None:
        self._share = share
        self._free: deque[Connection] = deque()

    async def run(self) -> Answer:
        loop, begin = asyncio.get_running_loop(), self._share.begin
        lags: list[float] = []
        watching = loop.create_task(self._watch(lags))
        tasks = []
        for index, arrival, body in self._share.requests:
            await _until(begin + arrival)
            tasks.append(loop.create_task(self._request(index, body.encode())))
        seen = await asyncio.wait_for(asyncio.gather(*tasks), _LONGEST_WAIT)
        watching.cancel()
        return Answer(list(seen), lags)

    async def _request(self, index: int, body: bytes) -> Seen:
        share = self._share
        seen = Seen(index, time.monotonic() - share.begin)
        head = (
            f"POST {share.path} HTTP/1.1\r\nHost: {share.host}:{share.port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        ).encode()
        try:
            connection = await self._connection()
            await connection.send(seen, head, body)
        except OSError as error:
            seen.error = f"{type(error).__name__}: {error}"
            return seen
        self._free.append(connection)
        return seen

    async def _connection(self) -> Connection:
        while self._free:
            if (one := self._free.pop()).usable:
                return one
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(
            lambda: Connection(self._share.begin), self._share.host, self._share.port
        )
        return made

    async def _watch(self, lags: list[float]) -> None:
        while True:
            due = time.monotonic() + _HEARTBEAT
            await asyncio.sleep(_HEARTBEAT)
            lags.append(max(time.monotonic() - due, 0.0))


async def _until(moment: float) -> None:
    """Wait until `moment` of time.monotonic(). Timers of the event loop are late by up to a millisecond, much of the
    time to a first token, so the last part of the wait polls."""
    left = moment - time.monotonic() - _POLLED
    if left > 0:
        await asyncio.sleep(left)
    while time.monotonic() < moment:
        await asyncio.sleep(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    share = Share(**json.loads(options.work.read_text(encoding="utf-8")))
    answer = asyncio.run(Client(share).run())
    options.json.write_text(json.dumps(asdict(answer)), encoding="utf-8")


if __name__ == "__main__":
    main()
