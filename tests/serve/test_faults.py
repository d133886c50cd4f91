"""Clients that leave, engines that die, signals: nothing stays occupied, and the server goes on or ends well."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_server import HttpServer, ServerClient, until
from run_seed import run_seed
from thread_server import connected, thread_server

pytestmark = [pytest.mark.xdist_group("serve"), pytest.mark.one_in_file(3)]
LONG = {"prompt": "go", "max_tokens": 4000, "ignore_eos": True}


@pytest.fixture
def own_server(chat_artifact: Path, tmp_path: Path) -> Iterator[HttpServer]:
    """A server of one test, which may harm it."""
    running = HttpServer(chat_artifact, tmp_path / "log", "--max-queue", 4, "--max-num-seqs", 2)
    yield running
    running.close()


class InFlight(threading.Thread):
    """A request in a thread: its status, and for a stream its events."""

    def __init__(self, server: ServerClient, **fields: Any) -> None:
        super().__init__(daemon=True)
        self._server, self._fields = server, {**LONG, **fields}
        self.status = 0
        self.events: list[str] = []
        self.start()

    def run(self) -> None:
        with contextlib.suppress(httpx.TransportError), self._server.client() as client:
            if not self._fields.get("stream"):
                self.status = client.post("/v1/completions", json=self._fields).status_code
                return
            with client.stream("POST", "/v1/completions", json=self._fields) as answer:
                self.status = answer.status_code
                for line in answer.iter_lines():
                    if line:
                        self.events.append(line)


@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_a_stream_frees_its_pages(server: HttpServer, n: int) -> None:
    fields, before = {**LONG, "stream": True, "n": n}, server.gauge("engine_steps_total")
    with (
        httpx.Client(timeout=60) as client,
        client.stream("POST", f"{server.url}/v1/completions", json=fields) as answer,
    ):
        events = answer.iter_lines()  # dropping the iterator would close the connection
        assert next(events).startswith("data: ")
        server.until_gauge("num_requests_running", n, 20)
    server.until_idle()
    assert server.gauge("engine_steps_total") - before < LONG["max_tokens"], "the request ran to its end"


def test_a_client_that_leaves_while_it_waits_frees_its_pages(server: HttpServer) -> None:
    before = server.gauge("engine_steps_total")
    with server.sent("/v1/completions", **LONG):
        server.until_gauge("num_requests_running", 1, 20)
    server.until_idle()
    assert server.gauge("engine_steps_total") - before < LONG["max_tokens"], "the request ran to its end"


@pytest.mark.slow
@pytest.mark.usefixtures("engine_thread")
def test_a_slow_reader_gets_everything_in_fewer_events(chat_artifact: Path, tmp_path: Path) -> None:
    """The connection's buffers fill, then deltas merge; the engine goes on. A Unix socket has small buffers."""
    with thread_server(chat_artifact, tmp_path) as server:
        fields = {**LONG, "seed": 1, "n": 4, "max_tokens": 200, "logprobs": 20}  # about a megabyte of events
        whole = server.complete(**fields).json()["choices"]
        body = json.dumps({**fields, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        with connected(server) as client:
            client.sendall(head.encode() + body)
            until(lambda: server.gauge("num_requests_running") == 4, 10)
            server.until_idle(60)  # the engine is done, and the client has read nothing
            with HTTPResponse(client) as answer:
                answer.begin()
                lines = answer.read().split(b"\n\n")
    events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    choices = [event["choices"][0] for event in events]
    for index in range(4):
        parts = [choice for choice in choices if choice["index"] == index]
        assert "".join(part["text"] for part in parts) == whole[index]["text"]
        tokens = [token for part in parts for token in part["logprobs"]["tokens"]]
        assert tokens == whole[index]["logprobs"]["tokens"]
    assert len(events) < 500, "of 800 tokens"


def test_a_storm_of_clients_that_leave(server: HttpServer) -> None:
    """A hundred requests of all kinds, most of them cut at a random time: requests, pages and descriptors return."""
    draw = random.Random(run_seed())
    server.complete(max_tokens=1)
    before = descriptors(server)

    async def one(client: httpx.AsyncClient, number: int) -> None:
        stream, n = draw.random() < 0.7, draw.choice((1, 1, 2))
        fields = {
            "prompt": f"{number} " * draw.randint(1, 30),
            "max_tokens": draw.randint(1, 200),
            "stream": stream,
            "n": n,
        }
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(draw.uniform(0.001, 0.8)):
                answer = await client.post(f"{server.url}/v1/completions", json=fields)
                assert answer.status_code == 200

    async def all_of_them() -> None:
        async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=50)) as client:
            await asyncio.gather(*(one(client, number) for number in range(100)))

    asyncio.run(all_of_them())
    server.until_idle()
    until(lambda: descriptors(server) <= before, 20)
    assert "Traceback" not in server.log.read_text()


def descriptors(server: HttpServer) -> int:
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


@pytest.mark.slow
def test_a_full_queue(own_server: HttpServer) -> None:
    """Two run and four wait; the seventh is refused, and a place is free once one of them leaves."""
    running = [InFlight(own_server) for _ in range(6)]
    until(lambda: own_server.http.get("/load").json()["server_load"] == 6, 10)
    until(lambda: own_server.gauge("num_requests_waiting") == 4, 10)
    refused = own_server.complete(max_tokens=1)
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["code"] == "queue_full"
    assert own_server.complete(max_tokens=1, stream=True).status_code == 429
    own_server.process.kill()
    for one in running:
        one.join(10)


def test_an_engine_that_is_killed(server: HttpServer) -> None:
    """The server is not ready within a second, requests in flight get 503, and a new engine serves the next."""
    waiting, streaming = InFlight(server), InFlight(server, stream=True)
    server.until_gauge("num_requests_running", 2, 10)
    # A stream whose first event has not been sent answers 503 too, so wait for that event.
    until(lambda: streaming.events, 10)
    os.kill(server.engine_process(), signal.SIGKILL)
    assert until(lambda: server.http.get("/ready").status_code == 503, 1) < 1
    refused = server.complete()
    assert refused.status_code == 503 and "retry-after" in refused.headers
    waiting.join(10)
    streaming.join(10)
    assert waiting.status == 503
    # The stream had begun: the error is its last event before the end.
    assert streaming.status == 200 and streaming.events[-1] == "data: [DONE]"
    assert json.loads(streaming.events[-2][6:])["error"]["code"] == "engine_unavailable"
    until(lambda: server.http.get("/ready").status_code == 200, 60)
    assert server.complete(max_tokens=3).status_code == 200
    server.until_idle()
    assert server.process.poll() is None


@pytest.mark.usefixtures("engine_thread")
def test_a_server_that_ends_drains(chat_artifact: Path, tmp_path: Path) -> None:
    """Requests that run are served to their end; it accepts no further ones, and is not ready."""
    with thread_server(chat_artifact, tmp_path) as server:
        streaming = InFlight(server, stream=True, max_tokens=200)
        whole = InFlight(server, max_tokens=200)
        server.until_gauge("num_requests_running", 2, 10)
        server.drain()
        streaming.join(30)
        whole.join(30)
        assert not server.serves()
    assert (streaming.status, whole.status) == (200, 200)
    assert streaming.events[-1] == "data: [DONE]"
    assert json.loads(streaming.events[-2][6:])["choices"][0]["finish_reason"] == "length"


@pytest.mark.slow
def test_sigterm_drains(own_server: HttpServer) -> None:
    """To the whole group, as service managers send it: the engine must not end first."""
    streaming = InFlight(own_server, stream=True, max_tokens=400)
    whole = InFlight(own_server, max_tokens=400)
    own_server.until_gauge("num_requests_running", 2, 10)
    os.kill(own_server.engine_process(), signal.SIGTERM)
    assert own_server.stop() == 0
    streaming.join(10)
    whole.join(10)
    assert (streaming.status, whole.status) == (200, 200)
    assert streaming.events[-1] == "data: [DONE]"
    assert json.loads(streaming.events[-2][6:])["choices"][0]["finish_reason"] == "length"


@pytest.mark.slow
def test_an_engine_that_dies_again_and_again_ends_the_server(own_server: HttpServer) -> None:
    for _ in range(4):
        until(lambda: own_server.http.get("/ready").status_code == 200, 60)
        os.kill(own_server.engine_process(), signal.SIGKILL)
        until(lambda: _ready(own_server) != 200, 5)
    assert own_server.process.wait(60) == 1
    assert "the engine died too often" in own_server.log.read_text()


def _ready(server: HttpServer) -> int:
    try:
        return server.http.get("/ready").status_code
    except httpx.TransportError:
        return 0


@pytest.mark.slow
def test_a_server_that_is_killed_takes_its_engine_along(own_server: HttpServer) -> None:
    engine = own_server.engine_process()
    own_server.process.kill()
    until(lambda: not _lives(engine), 10)


def _lives(process: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


@pytest.mark.slow
def test_a_request_that_takes_longer_than_the_drain_is_cut(chat_artifact: Path, tmp_path: Path) -> None:
    server = HttpServer(chat_artifact, tmp_path / "log", "--drain-seconds", 1)
    streaming = InFlight(server, stream=True)
    until(lambda: server.gauge("num_requests_running") == 1, 10)
    begin = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - begin < 10
    server.close()
    streaming.join(10)
