"""Send the mixed requests of a soak to a server, and record how each ended. soak_http.py starts several of these.

    python benchmarks/soak_client.py WORK --json FILE

WORK is a `Work`, as JSON. FILE gets a list of `Ended`. Of Ingot it needs plain Python only.
"""

import argparse
import asyncio
import contextlib
import json
import socket
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path

from soak_mix import COMPLETE, Mixed, mixed_requests

_PATH = "/v1/completions"
_LONGEST = 120.0  # seconds that a request may take
_SLOW_BYTES, _SLOW_PAUSE = 32, 0.25  # what a slow reader reads at a time, and the seconds before the next time
_SMALL_BUFFER = 4096  # bytes that a slow reader's socket receives unread
_IDLE_SECONDS = 2.0  # a connection that was idle longer is not used again: the server may be about to close it


@dataclass(frozen=True)
class Work:
    """The load of one client process. `begin` is a value of time.monotonic(); see mixed_requests for the others."""

    host: str
    port: int
    model: str
    begin: float
    rate: float
    seconds: float
    vocab: tuple[int, int]
    longest: int
    seed: str


@dataclass(frozen=True)
class Ended:
    """How a request ended. Times are seconds after its arrival.

    status   the status of the answer; 0 if the client closed before it
    first    when the first piece of a stream arrived; 0 if none did
    tokens   how many tokens the usage says
    fault    what is wrong with the answer; "" if nothing is
    """

    kind: str
    arrival: float
    status: int
    first: float
    whole: float
    tokens: int
    fault: str


class Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._headers: dict[bytes, bytes] = {}

    @property
    def usable(self) -> bool:
        return not (self._reader.at_eof() or self._writer.is_closing())

    def send(self, head: bytes, body: bytes) -> None:
        self._writer.write(head + body)

    async def status(self) -> int:
        """Read the head of the answer, and return its status."""
        head = await self._reader.readuntil(b"\r\n\r\n")
        first, *lines = head.split(b"\r\n")
        pairs = (line.partition(b":") for line in lines if line)
        self._headers = {name.lower(): value.strip() for name, _, value in pairs}
        return int(first.split(b" ")[1])

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body of the answer, piece by piece as the server wrote it."""
        if self._headers.get(b"transfer-encoding") != b"chunked":
            yield await self._reader.readexactly(int(self._headers.get(b"content-length", 0)))
            return
        while size := int(await self._reader.readline(), 16):
            piece = await self._reader.readexactly(size + 2)
            yield piece[:-2]
        await self._reader.readline()

    async def read_slowly(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and await self._reader.read(_SLOW_BYTES):
            await asyncio.sleep(_SLOW_PAUSE)

    def close(self, *, reset: bool = False) -> None:
        if reset:
            self._writer.transport.abort()
        else:
            self._writer.close()


class Client:
    def __init__(self, work: Work) -> None:
        self._work = work
        self._free: deque[tuple[float, Connection]] = deque()  # with the time of the last use
        self._ended: list[Ended] = []

    async def run(self) -> list[Ended]:
        work = self._work
        requests = mixed_requests(work.rate, work.seconds, work.model, work.vocab, work.longest, work.seed)
        async with asyncio.TaskGroup() as tasks:
            for one in requests:
                left = work.begin + one.arrival - time.monotonic()
                if left > 0:
                    await asyncio.sleep(left)
                tasks.create_task(self._request(one))
        for _, connection in self._free:
            connection.close()
        return self._ended

    async def _request(self, asked: Mixed) -> None:
        fault, found = "", (0, 0.0, 0)
        try:
            async with asyncio.timeout(_LONGEST):
                found = await getattr(self, f"_{asked.kind}")(asked)
        except TimeoutError:
            fault = f"it took more than {_LONGEST:g} s"
        except (OSError, asyncio.IncompleteReadError) as error:
            fault = f"{type(error).__name__}: {error}"
        status, first, tokens = found
        if not fault:
            fault = _fault(asked, status, tokens)
        now = self._now(asked)
        self._ended.append(Ended(asked.kind, asked.arrival, status, first, now, tokens, fault))

    def _now(self, asked: Mixed) -> float:
        return time.monotonic() - self._work.begin - asked.arrival

    async def _stream(self, asked: Mixed) -> tuple[int, float, int]:
        async with self._connection() as connection:
            connection.send(self._head(asked), asked.body)
            status, first, last = await connection.status(), 0.0, b""
            async for piece in connection.pieces():
                first = first or self._now(asked)
                last = last[-4096:] + piece  # the usage and the end mark may come in one piece
            return status, first, _streamed_tokens(last)

    async def _whole(self, asked: Mixed) -> tuple[int, float, int]:
        async with self._connection() as connection:
            connection.send(self._head(asked), asked.body)
            status = await connection.status()
            answer = b"".join([piece async for piece in connection.pieces()])
            return status, 0.0, int(json.loads(answer).get("usage", {}).get("completion_tokens", 0))

    async def _bad(self, asked: Mixed) -> tuple[int, float, int]:
        connection = await self._open()
        try:
            connection.send(self._head(asked), asked.body)
            return await connection.status(), 0.0, 0
        finally:
            connection.close()

    async def _cancel(self, asked: Mixed) -> tuple[int, float, int]:
        connection = await self._open()
        try:
            connection.send(self._head(asked), asked.body)
            status, count, first = await connection.status(), 0, 0.0
            async for _ in connection.pieces():
                first = first or self._now(asked)
                count += 1
                if count > asked.stop:
                    break
            return status, first, 0
        finally:
            connection.close(reset=asked.reset)

    async def _drop(self, asked: Mixed) -> tuple[int, float, int]:
        connection = await self._open()
        try:
            connection.send(self._head(asked), asked.body[: len(asked.body) // 2] if asked.reset else asked.body)
            await asyncio.sleep(asked.stop)
            return 0, 0.0, 0
        finally:
            connection.close(reset=asked.reset)

    async def _slow(self, asked: Mixed) -> tuple[int, float, int]:
        connection = await self._open(slow=True)
        try:
            connection.send(self._head(asked), asked.body)
            status, first = await connection.status(), self._now(asked)
            await connection.read_slowly(asked.stop)
            return status, first, 0
        finally:
            connection.close(reset=asked.reset)

    def _head(self, asked: Mixed) -> bytes:
        work = self._work
        return (
            f"POST {_PATH} HTTP/1.1\r\nHost: {work.host}:{work.port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(asked.body)}\r\n\r\n"
        ).encode()

    @contextlib.asynccontextmanager
    async def _connection(self) -> AsyncIterator[Connection]:
        """Yield a connection, which is used again unless the block raises."""
        connection = None
        while self._free and connection is None:
            used, one = self._free.pop()
            if one.usable and time.monotonic() - used < _IDLE_SECONDS:
                connection = one
            else:
                one.close()
        connection = connection or await self._open()
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        self._free.append((time.monotonic(), connection))

    async def _open(self, *, slow: bool = False) -> Connection:
        work = self._work
        if not slow:
            return Connection(*await asyncio.open_connection(work.host, work.port))
        one = socket.socket()
        one.setblocking(False)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_BUFFER)
        await asyncio.get_running_loop().sock_connect(one, (work.host, work.port))
        return Connection(*await asyncio.open_connection(sock=one, limit=_SMALL_BUFFER))


def _streamed_tokens(last: bytes) -> int:
    """Return the tokens that the usage at the end of a stream says, or 0."""
    for event in reversed(last.split(b"\n\n")):
        if event.startswith(b"data: {"):
            usage = json.loads(event.removeprefix(b"data: ")).get("usage")
            return int(usage["completion_tokens"]) if usage else 0
    return 0


def _fault(asked: Mixed, status: int, tokens: int) -> str:
    """Return what is wrong with an answer, or ""."""
    if asked.kind == "bad":
        return "" if 400 <= status < 500 else f"a bad body was answered with status {status}"
    if asked.kind in COMPLETE:
        return "" if status == 200 and tokens == asked.output else f"status {status}, {tokens} of {asked.output} tokens"
    return "" if status in (0, 200) else f"status {status}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    work = json.loads(options.work.read_text(encoding="utf-8"))
    ended = asyncio.run(Client(Work(**{**work, "vocab": tuple(work["vocab"])})).run())
    options.json.write_text(json.dumps([asdict(one) for one in ended]), encoding="utf-8")


if __name__ == "__main__":
    main()
