"""The load over HTTP: what its clients record of a server's events."""

from __future__ import annotations

import importlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import ModuleType

import pytest

from ingot.bench.workload import BenchRequest

pytestmark = pytest.mark.one_in_file(3)

EVENTS, PAUSE = 3, 0.05


class Streaming(BaseHTTPRequestHandler):
    """Sends EVENTS events, PAUSE seconds apart, and the usage. Refuses prompts that begin with 7."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["stream"] and body["ignore_eos"] and body["stream_options"] == {"include_usage": True}
        if body["prompt"][0] == 7:
            self.send_response(429)
            self.send_header("Content-Length", "4")
            self.end_headers()
            self.wfile.write(b"full")
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for _ in range(EVENTS):
            time.sleep(PAUSE)
            self._event(json.dumps({"choices": [{"text": "a"}]}))
        self._event(json.dumps({"choices": [], "usage": {"completion_tokens": body["max_tokens"]}}))
        self._event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def _event(self, data: str) -> None:
        text = f"data: {data}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(text), text))

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def port() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Streaming)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def load(benchmarks: None) -> ModuleType:
    return importlib.import_module("http_load")


def test_records(load: ModuleType, port: int) -> None:
    """Of more tokens than events, the first and the last have the times of the first and the last event."""
    requests = [BenchRequest((1, 2), 5, 0.0), BenchRequest((7,), 5, 0.1), BenchRequest((3,), EVENTS, 0.3)]
    done = load.send("127.0.0.1", port, "m", requests, 2)
    first, refused, last = done.run.records
    assert [one.request for one in done.run.records] == requests
    assert len(first.token_times) == 5 and len(last.token_times) == EVENTS
    for one in (first, last):
        assert one.completed and one.token_times == sorted(one.token_times)
        assert one.token_times[0] >= one.started + PAUSE
        assert one.token_times[-1] >= one.token_times[0] + (EVENTS - 1) * PAUSE * 0.9
    assert refused.error == "status 429: full" and not refused.completed
    assert done.lags and min(done.lags) >= 0


def test_a_server_that_is_not_there(load: ModuleType) -> None:
    (one,) = load.send("127.0.0.1", 9, "m", [BenchRequest((1,), 2)], 1).run.records
    assert "refused" in one.error.lower()


def test_a_load_within_its_limits_runs_to_the_end(load: ModuleType, port: int) -> None:
    requests = [BenchRequest((1, index), 3, 0.01 * index) for index in range(6)]
    done = load.send("127.0.0.1", port, "m", requests, 2, most=(10.0, 10.0), failed=0)
    assert done.exceeded == 0 and all(one.completed for one in done.run.records)


@pytest.mark.parametrize("most", [(PAUSE / 5, 10.0), (10.0, PAUSE / 5)])
def test_a_load_that_exceeds_its_limits_ends_early(load: ModuleType, port: int, most: tuple[float, float]) -> None:
    """The last requests would arrive after a minute. Each client sees the other's count."""
    requests = [BenchRequest((1, index), 3, 60.0 * (index > 5)) for index in range(8)]
    begin = time.monotonic()
    done = load.send("127.0.0.1", port, "m", requests, 2, most=most, failed=4)
    assert 4 < done.exceeded <= 6 and time.monotonic() - begin < 30
    assert [one.error for one in done.run.records][6:] == ["the load ended early"] * 2
