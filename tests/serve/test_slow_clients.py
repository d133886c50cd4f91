"""Clients that send slowly: each part of a request has a time limit, and others are served at the same time."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from thread_server import ThreadServer, connected, thread_server

pytestmark = pytest.mark.xdist_group("serve")
READ_SECONDS = 0.5


@pytest.fixture(scope="module")
def impatient(
    chat_artifact: Path, tmp_path_factory: pytest.TempPathFactory, engine_thread: object
) -> Iterator[ThreadServer]:
    with thread_server(chat_artifact, tmp_path_factory.mktemp("slow"), read_seconds=READ_SECONDS) as running:
        yield running


def until_closed(connection: socket.socket) -> bytes:
    answer = b""
    with contextlib.suppress(ConnectionError):  # closed before it had read all that was sent
        while piece := connection.recv(1 << 16):
            answer += piece
    return answer


def test_headers_that_never_end(impatient: ThreadServer) -> None:
    """Fifty connections send a byte now and then. Other clients wait for none of them."""
    begin = time.monotonic()
    slow = [connected(impatient) for _ in range(50)]
    for connection in slow:
        connection.sendall(b"GET /health HTTP/1.1\r\n")
    for _ in range(4):
        for connection in slow:
            with contextlib.suppress(ConnectionError):  # on a busy machine its time is over
                connection.sendall(b"X")
        assert impatient.complete(max_tokens=1).status_code == 200
        time.sleep(READ_SECONDS / 8)
    for connection in slow:
        assert until_closed(connection).startswith(b"HTTP/1.1 408 ")
        connection.close()
    # Quietly two times READ_SECONDS; one connection after the other would take fifty.
    assert time.monotonic() - begin < 30 * READ_SECONDS


def test_a_connection_without_a_request(impatient: ThreadServer) -> None:
    with connected(impatient) as silent:
        assert until_closed(silent).startswith(b"HTTP/1.1 408 ")


def test_a_body_that_never_ends(impatient: ThreadServer) -> None:
    with connected(impatient) as slow:
        slow.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\nConnection: close\r\n\r\n{"
        )
        answer = until_closed(slow)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert "did not arrive" in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


def test_a_long_answer_and_a_pause_are_no_slow_request(impatient: ThreadServer) -> None:
    """The limit is on sending a request; answers may take longer, and connections stay open between requests."""
    begin = time.monotonic()
    assert impatient.complete(max_tokens=50, ignore_eos=True).status_code == 200
    tokens = int(50 * 1.5 * READ_SECONDS / (time.monotonic() - begin)) + 50
    for _ in range(2):
        begin = time.monotonic()
        assert impatient.complete(max_tokens=tokens, ignore_eos=True).status_code == 200
        if time.monotonic() - begin > READ_SECONDS:
            break
        tokens *= 2  # the machine has become faster
    else:
        pytest.fail("the answers are too short for this test")
    time.sleep(READ_SECONDS)
    assert impatient.complete(max_tokens=1).status_code == 200
