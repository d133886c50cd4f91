"""`ingot serve` in a process of its own, for tests that are its clients."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

READY = re.compile(r"ready: (\S+) serves")
# Loading torch and a tiny model on two busy cores.
START_SECONDS = 120.0


class ServerClient:
    """A client of a running server. `url` is its address, "unix:" and a path for a Unix socket; requests go through
    `http`."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.http = self.client()

    def client(self) -> httpx.Client:
        """A further client, with connections of its own."""
        if not self.url.startswith("unix:"):
            return httpx.Client(base_url=self.url, timeout=60)
        transport = httpx.HTTPTransport(uds=self.url.removeprefix("unix:"))
        return httpx.Client(base_url="http://server", timeout=60, transport=transport)

    def complete(self, **fields: Any) -> httpx.Response:
        """The answer to a completion."""
        return self.http.post("/v1/completions", json={"prompt": "go", **fields})

    def sent(self, path: str, **fields: Any) -> socket.socket:
        """A connection of its own on which a request was sent. Closing it is what a client does that leaves."""
        body = json.dumps(fields).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        if self.url.startswith("unix:"):
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(self.url.removeprefix("unix:"))
        else:
            host, _, port = self.url.removeprefix("http://").partition(":")
            connection = socket.create_connection((host, int(port)))
        connection.settimeout(60)
        connection.sendall(head.encode() + body)
        return connection

    def load(self) -> int:
        """The number of unfinished requests."""
        found: int = self.http.get("/load").json()["server_load"]
        return found

    def gauge(self, name: str) -> float:
        """The value of a metric."""
        found = re.search(rf"^(?:vllm|ingot):{name}\{{[^}}]*\}} (\S+)$", self.http.get("/metrics").text, re.MULTILINE)
        assert found is not None, name
        return float(found[1])

    def until_gauge(self, name: str, value: float, seconds: float) -> None:
        """Waits until a metric has a value."""
        seen: list[float] = []

        def reached() -> bool:
            seen.append(self.gauge(name))
            return seen[-1] == value

        try:
            until(reached, seconds)
        except AssertionError as error:
            raise AssertionError(f"{name} is not {value}, but {sorted(set(seen))}; last {seen[-1]}") from error

    def until_idle(self, seconds: float = 20.0) -> None:
        """Waits until no request runs or waits, and no KV page is held.

        An answer can arrive before the counts that follow it, and pages of an ended sequence are held until the steps
        in flight are complete.
        """
        seen: dict[str, float] = {}

        def idle() -> bool:
            names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
            seen.update({name: self.gauge(name) for name in names}, server_load=self.load())
            return not any(seen.values())

        try:
            until(idle, seconds)
        except AssertionError as error:
            raise AssertionError(f"not idle within {seconds} s: {seen}") from error


class HttpServer(ServerClient):
    """A server in a process of its own. Ends with `stop` or `close`."""

    def __init__(
        self,
        model: Path,
        log: Path,
        *options: object,
        start_seconds: float = START_SECONDS,
        **environment: str,
    ) -> None:
        command = [sys.executable, "-m", "ingot", "serve", model, "--port", 0, *options]
        self.log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [str(part) for part in command], stderr=file, stdout=file, env={**os.environ, **environment}
            )
        try:
            super().__init__(self._when_ready(start_seconds))
        except BaseException:
            self.process.kill()
            raise

    def _when_ready(self, seconds: float) -> str:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if found := READY.search(self.log.read_text()):
                return found[1]
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        raise AssertionError(f"the server is not ready:\n{self.log.read_text()}")

    def engine_process(self) -> int:
        """The process id of the engine."""
        (engine,) = self.engine_processes()
        return engine

    def engine_processes(self) -> list[int]:
        """The process ids of the engines: the server's children that run the engine's module."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                parent = int(stat.read_text().rpartition(")")[2].split()[1])
                command = (stat.parent / "cmdline").read_bytes()
            except OSError:
                continue
            if parent == self.process.pid and b"ingot.serve.engine.process" in command:
                found.append(int(stat.parent.name))
        return sorted(found)

    def stop(self) -> int:
        """Ends the server as a service manager does. Returns its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def close(self) -> None:
        self.http.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(60)


def until(true: Any, seconds: float, every: float = 0.02) -> float:
    """Waits until `true()`, and returns how long that took."""
    begin = time.monotonic()
    while time.monotonic() - begin < seconds:
        if true():
            return time.monotonic() - begin
        time.sleep(every)
    raise AssertionError(f"not within {seconds} s")
