"""Kill the engine of a server that works, and measure how long clients notice it.

    python benchmarks/engine_restart.py ARTIFACT [--requests 32] [--json FILE]

`ingot serve` runs as a child, with streams in flight. The script sends SIGKILL to the engine process and asks /ready
without a pause. Figures: seconds until /ready answers 503, until it answers 200 again, and until a new request has its
answer; and how many streams ended with the error of a dead engine.
"""

import argparse
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

from http_servers import HOST, ask, free_port, ingot_command, model_name, running
from process_samples import engine_process
from results import Figure, add_json_option, report

_START_SECONDS = 600.0  # a checkpoint is compiled first
_BACK_SECONDS = 60.0
_PROMPT = 64  # tokens; the rest of the longest sequence is generated, so that no stream ends before the kill


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--requests", type=int, default=32, help="streams in flight when the engine is killed")
    add_json_option(parser)
    options = parser.parse_args()
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with running(ingot_command(options.artifact, port), port, env={}, timeout=_START_SECONDS, log=log) as server:
            name, longest = model_name(port), _longest(port)
            streams = [Stream(port, name, longest - _PROMPT) for _ in range(options.requests)]
            for one in streams:
                one.begun.wait()
            os.kill(engine_process(server.pid), signal.SIGKILL)
            killed = time.monotonic()
            gone = _until_ready_is(port, 503) - killed
            back = _until_ready_is(port, 200) - killed
            status, _ = ask(port, "POST", "/v1/completions", _body(name, 1, stream=False))
            answered = time.monotonic() - killed
            for one in streams:
                one.join()
    if status != 200:
        sys.exit(f"the request after the restart has status {status}")
    failed = sum(one.failed for one in streams)
    figures = {
        "start": Figure(value=server.seconds, unit="s", what="from the server's start to its first answer"),
        "not_ready": Figure(value=gone, unit="s", what="from the kill until /ready answers 503"),
        "ready": Figure(value=back, unit="s", what="from the kill until /ready answers 200 again"),
        "answered": Figure(value=answered, unit="s", what="from the kill until a new request has its answer"),
        "failed": Figure(
            value=failed, unit="", what=f"of {options.requests} streams ended with the error of a dead engine"
        ),
    }
    report(__file__, options.json, {"artifact": options.artifact.name, "requests": options.requests}, figures)


class Stream(threading.Thread):
    """A streamed request. `begun` is set at its first event, `failed` if its last one is the error of a dead engine."""

    def __init__(self, port: int, model: str, output: int) -> None:
        super().__init__(daemon=True)
        self.begun = threading.Event()
        self.failed = False
        self._port, self._model, self._output = port, model, output
        self.start()

    def run(self) -> None:
        body = _body(self._model, self._output, stream=True)
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        received = b""
        with socket.create_connection((HOST, self._port)) as connection:
            connection.sendall((head + body).encode())
            while piece := connection.recv(1 << 16):
                received = (received + piece)[-1000:]
                if b"data: " in received:
                    self.begun.set()
        self.begun.set()
        self.failed = b'"code":"engine_unavailable"' in received


def _longest(port: int) -> int:
    """Return the most tokens of a sequence."""
    _, answer = ask(port, "GET", "/v1/models")
    return int(json.loads(answer)["data"][0]["max_model_len"])


def _body(model: str, tokens: int, *, stream: bool) -> str:
    fields = {"model": model, "prompt": list(range(300, 300 + _PROMPT)), "max_tokens": tokens, "ignore_eos": True}
    return json.dumps({**fields, "temperature": 0.0, "stream": stream})


def _until_ready_is(port: int, wanted: int) -> float:
    """Return the moment at which /ready answers `wanted`."""
    begin = time.monotonic()
    while ask(port, "GET", "/ready")[0] != wanted:
        if time.monotonic() - begin > _BACK_SECONDS:
            sys.exit(f"/ready did not answer {wanted} within {_BACK_SECONDS:g} s")
    return time.monotonic()


if __name__ == "__main__":
    main()
