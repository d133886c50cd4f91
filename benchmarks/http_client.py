"""Send requests to an OpenAI server at their arrival times, and record when the events of each came back.

    python benchmarks/http_client.py WORK --json FILE

http_load.py starts several of these processes, each with its share of the requests in WORK (`Share`, as JSON). FILE
gets an `Answer`. Connections are kept alive and are used again. With limits of latency, the clients count the requests
that exceed them in a file that all map, and end together once the counts exceed a limit. It needs httptools, and of
Ingot nothing.
"""

import argparse
import asyncio
import contextlib
import json
import mmap
import struct
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
_LOOK = 0.05  # seconds between two looks at requests that wait for their first token, and at the other clients' counts
_COUNT = struct.Struct("=I")


@dataclass(frozen=True)
class Limits:
    """Limits of latency, and when to stop a load that exceeds them.

    first    the most seconds until the first token
    further  the most seconds per token after the first, on average over a request
    failed   the most requests of all clients that may exceed a limit or fail; one more ends the load
    counts   the file where each client keeps the number of its such requests, 4 bytes each
    """

    first: float
    further: float
    failed: int
    counts: str


@dataclass(frozen=True)
class Share:
    """The requests of one client process, in arrival order.

    begin     the moment of arrival 0, of time.monotonic(), the clock that all processes of a machine share
    requests  for each: its index, its arrival in seconds after `begin`, and the body to send, as JSON
    number    which of the clients this is
    limits    the limits of latency, or None to run to the end
    polls     poll the sockets while requests run, instead of sleeping: events are seen sooner, and a core is busy
    """

    host: str
    port: int
    path: str
    begin: float
    requests: list[tuple[int, float, str]]
    number: int = 0
    limits: Limits | None = None
    polls: bool = False


@dataclass
class Seen:
    """The answer to one request. Times are in seconds after the beginning.

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
    """The result of a client process. `lags` are delays of its event loop, in seconds, one for each heartbeat.

    `seen` has no requests that were still running when the load ended early.
    """

    seen: list[Seen]
    lags: list[float]


class Counts:
    """The numbers of failed requests of all clients, in a file that each client maps. A client changes its own."""

    def __init__(self, limits: Limits, number: int) -> None:
        self._limits, self._number, self._own = limits, number, 0
        with open(limits.counts, "r+b") as file:
            self._shared = mmap.mmap(file.fileno(), 0)

    def add(self) -> None:
        self._own += 1
        _COUNT.pack_into(self._shared, self._number * _COUNT.size, self._own)

    @property
    def too_many(self) -> bool:
        return sum(count for (count,) in _COUNT.iter_unpack(self._shared[:])) > self._limits.failed


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

    def close(self) -> None:
        self._transport.close()

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
        self._ended: list[Seen] = []
        self._waiting: dict[int, tuple[float, Seen]] = {}  # the arrival of each running request, by index
        self._judged: set[int] = set()  # the requests that have exceeded a limit
        self._polling = False
        self._counts = None if share.limits is None else Counts(share.limits, share.number)

    async def run(self) -> Answer:
        loop = asyncio.get_running_loop()
        lags: list[float] = []
        watching = loop.create_task(self._watch(lags))
        sending = loop.create_task(self._send_all())
        stopping = [] if self._counts is None else [loop.create_task(self._stop())]
        done, running = await asyncio.wait([sending, *stopping], return_when=asyncio.FIRST_COMPLETED)
        for one in (*running, watching):
            one.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await one
        for one in done:
            one.result()
        return Answer(self._ended, lags)

    async def _send_all(self) -> None:
        """Send each request at its arrival, and wait for the ends of all."""
        begin = self._share.begin
        last = self._share.requests[-1][1] if self._share.requests else 0.0
        async with asyncio.timeout(begin + last + _LONGEST_WAIT - time.monotonic()), asyncio.TaskGroup() as tasks:
            for index, arrival, body in self._share.requests:
                await _until(begin + arrival)
                tasks.create_task(self._request(index, arrival, body.encode()))

    async def _request(self, index: int, arrival: float, body: bytes) -> None:
        seen = Seen(index, time.monotonic() - self._share.begin)
        self._waiting[index] = arrival, seen
        if self._share.polls and not self._polling:
            self._poll()
        await self._answer(seen, body)
        del self._waiting[index]
        self._ended.append(seen)
        self._judge(arrival, seen)

    def _poll(self) -> None:
        """Keep the event loop from sleeping until no request waits for an answer."""
        self._polling = bool(self._waiting)
        if self._polling:
            asyncio.get_running_loop().call_soon(self._poll)

    def _judge(self, arrival: float, seen: Seen) -> None:
        """Count a request that has ended and exceeded a limit."""
        limits, events = self._share.limits, seen.events
        if limits is None:
            return
        further = (events[-1] - events[0]) / (seen.tokens - 1) if events and seen.tokens > 1 else 0.0
        if seen.error or not events or events[0] - arrival > limits.first or further > limits.further:
            self._fail(seen.index)

    def _fail(self, index: int) -> None:
        if self._counts is not None and index not in self._judged:
            self._judged.add(index)
            self._counts.add()

    async def _stop(self) -> None:
        """Return when the requests of all clients have exceeded the limits too often."""
        assert self._counts is not None and self._share.limits is not None
        while not self._counts.too_many:
            await asyncio.sleep(_LOOK)
            now = time.monotonic() - self._share.begin
            late = [
                index
                for index, (arrival, seen) in self._waiting.items()
                if not seen.events and now - arrival > self._share.limits.first
            ]
            for index in late:
                self._fail(index)

    async def _answer(self, seen: Seen, body: bytes) -> None:
        share = self._share
        head = (
            f"POST {share.path} HTTP/1.1\r\nHost: {share.host}:{share.port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        ).encode()
        try:
            connection = await self._connection()
        except OSError as error:
            seen.error = f"{type(error).__name__}: {error}"
            return
        try:
            await connection.send(seen, head, body)
        except asyncio.CancelledError:
            connection.close()
            raise
        self._free.append(connection)

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
    work = json.loads(options.work.read_text(encoding="utf-8"))
    share = Share(**{**work, "limits": work["limits"] and Limits(**work["limits"])})
    answer = asyncio.run(Client(share).run())
    options.json.write_text(json.dumps(asdict(answer)), encoding="utf-8")


if __name__ == "__main__":
    main()
