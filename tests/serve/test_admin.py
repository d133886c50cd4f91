"""The operators' routes: who reaches them, and what they do to requests, memory and the cache."""

from __future__ import annotations

import json
import os
import signal
import stat
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_server import HttpServer, ServerClient, until
from thread_server import EngineThread, thread_server

from ingot.ir.errors import OptionError
from ingot.serve.http.admin.options import AdminOptions
from ingot.serve.http.options import HttpOptions

pytestmark = [pytest.mark.xdist_group("serve"), pytest.mark.one_in_file(3)]
# For requests that an order ends, and for requests that run to their end.
LONG: dict[str, Any] = {"max_tokens": 3000, "ignore_eos": True, "temperature": 0}
MIDDLE: dict[str, Any] = {**LONG, "max_tokens": 120}


class Operated:
    """A server of the tiny chat model, and its operators' socket."""

    def __init__(self, server: ServerClient, admin: ServerClient, folder: Path) -> None:
        self.server, self.admin, self.folder = server, admin, folder
        self._threads = ThreadPoolExecutor(8)

    def order(self, path: str, status: int = 200, **arguments: Any) -> Any:
        response = self.admin.http.post(path, params=arguments)
        assert response.status_code == status, response.text
        return response.json()

    def begin(self, **fields: Any) -> Future[httpx.Response]:
        """Send a completion, without waiting for its answer."""
        return self._threads.submit(self.server.complete, **fields)

    def begin_order(self, path: str, **arguments: Any) -> Future[Any]:
        return self._threads.submit(self.order, path, **arguments)

    def begin_waiting(self) -> Future[httpx.Response]:
        """Send completions until one waits, because a pause has begun. Return it."""
        for _ in range(100):
            one = self.begin(max_tokens=1)
            until(lambda one=one: one.done() or self.server.gauge("num_requests_waiting") == 1, 10)
            if not one.done():
                return one
        raise AssertionError("no pause begins")

    def running(self, number: int) -> None:
        """Wait until so many sequences run."""
        self.server.until_gauge("num_requests_running", number, 10)


@pytest.fixture(scope="module")
def operated(
    chat_artifact: Path, tmp_path_factory: pytest.TempPathFactory, engine_thread: type[EngineThread]
) -> Iterator[Operated]:
    folder = tmp_path_factory.mktemp("admin")
    admin = AdminOptions(uds=folder / "admin", profile_dir=folder / "profiles")
    with thread_server(chat_artifact, folder, admin=admin) as server:
        operators = ServerClient(f"unix:{folder / 'admin'}")
        yield Operated(server, operators, folder)
        operators.http.close()
    assert not (folder / "admin").exists()


@pytest.fixture(autouse=True)
def _leaves_it_running(operated: Operated) -> Iterator[None]:
    yield
    operated.admin.http.post("/wake_up")
    operated.admin.http.post("/resume")
    assert operated.server.complete(max_tokens=1).status_code == 200
    assert operated.server.http.get("/ready").status_code == 200


def test_only_the_owner_opens_the_socket(operated: Operated) -> None:
    assert stat.S_IMODE((operated.folder / "admin").stat().st_mode) == 0o600
    for path in ("/pause", "/sleep", "/start_profile", "/reset_prefix_cache"):
        assert operated.server.http.post(path).status_code == 404, "a client reaches it"
    assert operated.admin.http.post("/v1/completions", json={"prompt": "a"}).status_code == 404
    assert operated.admin.http.get("/pause").status_code == 405


def test_a_port_needs_its_key(chat_artifact: Path, tmp_path: Path, engine_thread: type[EngineThread]) -> None:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {"api_keys": ("client",), "admin": AdminOptions(port=port, key="operator")}
    with thread_server(chat_artifact, tmp_path, **options), httpx.Client(base_url=f"http://127.0.0.1:{port}") as http:
        for key, status in ((None, 401), ("client", 401), ("operator", 200)):
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            assert http.get("/is_paused", headers=headers).status_code == status
        key = {"Authorization": "Bearer operator"}
        assert http.get("/is_paused", headers={**key, "Origin": "https://elsewhere"}).status_code == 403


@pytest.mark.parametrize(
    ("admin", "said"),
    [
        (AdminOptions(port=1), "without a key"),
        (AdminOptions(port=1, key="client"), "API key too"),
        (AdminOptions(port=70000, key="a"), "70000"),
        (AdminOptions(port=1, key="a", uds=Path("b")), "--admin-uds and --admin-port"),
        (AdminOptions(key="a"), "without --admin-port"),
        (AdminOptions(uds=Path("clients")), "is --uds"),
        (AdminOptions(profile_dir=Path("a")), "--profile-dir"),
    ],
)
def test_options_that_contradict(admin: AdminOptions, said: str) -> None:
    with pytest.raises(OptionError, match=said) as caught:
        admin.check(HttpOptions(("tiny",), uds=Path("clients"), api_keys=("client",)))
    assert caught.value.expected


def test_kept_requests_go_on_after_a_pause(operated: Operated) -> None:
    expected = operated.server.complete(**MIDDLE).json()["choices"]
    running = operated.begin(**MIDDLE)
    operated.running(1)
    assert operated.order("/pause", mode="keep") == {"status": "paused"}
    assert operated.admin.http.get("/is_paused").json() == {"is_paused": True}
    assert operated.server.http.get("/ready").status_code == 503
    assert operated.server.http.get("/health").status_code == 200
    waiting = operated.begin(max_tokens=2)
    operated.server.until_gauge("num_requests_waiting", 1, 20)
    time.sleep(0.2)
    assert not running.done() and not waiting.done()
    assert operated.order("/resume") == {"status": "resumed"}
    assert running.result(60).json()["choices"] == expected
    assert waiting.result(60).status_code == 200


def test_running_requests_end_before_a_pause(operated: Operated) -> None:
    running = operated.begin(**MIDDLE)
    operated.running(1)
    pause = operated.begin_order("/pause", mode="wait")
    late = operated.begin_waiting()
    pause.result(60)
    assert running.result(30).json()["choices"][0]["finish_reason"] == "length"
    time.sleep(0.1)
    assert not late.done() and operated.server.gauge("num_requests_waiting") == 1
    operated.order("/resume")
    assert late.result(60).status_code == 200


def test_running_requests_are_ended_by_a_pause(operated: Operated) -> None:
    running = [operated.begin(**LONG) for _ in range(3)]
    operated.running(3)
    operated.order("/pause")
    for one in running:
        response = one.result(30)
        assert response.status_code == 503 and response.headers["Retry-After"]
        assert "operator" in response.json()["error"]["message"]
    operated.order("/pause", mode="keep")  # a paused engine stays paused
    operated.order("/pause", mode="wait")
    operated.order("/resume")
    operated.order("/resume")


def test_resuming_ends_a_long_wait(operated: Operated) -> None:
    running = operated.begin(**MIDDLE)
    operated.running(1)
    pause = operated.begin_order("/pause", status=400, mode="wait")
    late = operated.begin_waiting()
    operated.order("/resume")
    assert "goes on" in pause.result(30)["error"]["message"]
    assert late.result(60).status_code == 200 and running.result(60).status_code == 200


def test_a_client_that_leaves_a_pause(operated: Operated) -> None:
    operated.order("/pause", mode="keep")
    with operated.server.sent("/v1/completions", prompt="a"):
        operated.server.until_gauge("num_requests_waiting", 1, 20)
    operated.server.until_gauge("num_requests_waiting", 0, 20)
    operated.order("/resume")


@pytest.mark.parametrize(("level", "mode"), [(1, "abort"), (2, "wait")])
def test_sleep_ends_the_engine_and_waking_starts_another(operated: Operated, level: int, mode: str) -> None:
    before = len(EngineThread.started)
    expected = operated.server.complete(temperature=0, max_tokens=5).json()["choices"]
    running = operated.begin(**LONG if mode == "abort" else MIDDLE)
    operated.running(1)
    operated.order("/sleep", level=level, mode=mode)
    assert running.result(30).status_code == (503 if mode == "abort" else 200)
    assert not EngineThread.started[-1].alive, "the engine still has its memory"
    assert operated.admin.http.get("/is_sleeping").json() == {"is_sleeping": True}
    response = operated.server.complete()
    assert response.status_code == 503 and "sleeps" in response.json()["error"]["message"]
    assert operated.server.http.get("/ready").status_code == 503
    assert operated.server.http.get("/health").status_code == 200
    operated.order("/sleep", level=3 - level)  # the other level
    operated.order("/reset_prefix_cache", status=503)
    assert len(EngineThread.started) == before, "it was started again by itself"
    operated.order("/wake_up")
    assert operated.admin.http.get("/is_sleeping").json() == {"is_sleeping": False}
    assert len(EngineThread.started) == before + 1
    assert operated.server.complete(temperature=0, max_tokens=5).json()["choices"] == expected
    operated.order("/wake_up")
    assert 'ingot:engine_restarts_total{engine="0",model_name="tiny"} 0.0' in operated.server.http.get("/metrics").text


def test_the_prefix_cache_is_emptied(operated: Operated) -> None:
    prompt = "a prefix of more than one page, which later requests share"

    def cached() -> int:
        details = operated.server.complete(prompt=prompt, max_tokens=1).json()["usage"]["prompt_tokens_details"]
        found: int = details["cached_tokens"]
        return found

    cached()
    assert cached() > 0
    operated.order("/reset_prefix_cache")
    assert cached() == 0 and cached() > 0
    running = operated.begin(**LONG)
    operated.running(1)
    assert "requests run" in operated.order("/reset_prefix_cache", status=409)["error"]["message"]
    operated.order("/reset_prefix_cache", reset_running_requests="true")
    assert running.result(30).status_code == 503
    assert cached() == 0 and cached() > 0
    operated.order("/pause")  # it empties the cache, too
    operated.order("/resume")
    assert cached() == 0


def test_a_profile_is_recorded(operated: Operated) -> None:
    assert "no profile" in operated.order("/stop_profile", status=400)["error"]["message"]
    operated.order("/start_profile")
    assert "already" in operated.order("/start_profile", status=400)["error"]["message"]
    operated.server.complete(max_tokens=2)
    path = Path(operated.order("/stop_profile")["path"])
    assert path.parent == operated.folder / "profiles" and [*path.parent.iterdir()] == [path]
    names = {one.get("name") for one in json.loads(path.read_text())["traceEvents"]}
    assert any(name.startswith("aten::") for name in names if isinstance(name, str)), sorted(map(str, names))[:50]


@pytest.mark.parametrize(
    ("path", "arguments", "said"),
    [
        ("/pause", {"mode": "stop"}, "abort, wait, keep"),
        ("/pause", {"clear_cache": "maybe"}, "true or false"),
        ("/pause", {"mod": "keep"}, "mod = "),
        ("/sleep", {"level": 3}, "1 or 2"),
        ("/sleep", {"level": 0}, "/pause?mode=keep"),
        ("/sleep", {"mode": "keep"}, "discards the KV cache"),
        ("/wake_up", {"tags": "weights"}, "loads both"),
        ("/reset_prefix_cache", {"reset_external": "true"}, "no prefix cache outside"),
        ("/reset_mm_cache", {}, "text only"),
        ("/reset_encoder_cache", {}, "text only"),
    ],
)
def test_orders_that_are_refused(operated: Operated, path: str, arguments: dict[str, Any], said: str) -> None:
    assert said in operated.order(path, status=400, **arguments)["error"]["message"]


def test_profiles_need_a_folder(chat_artifact: Path, tmp_path: Path, engine_thread: type[EngineThread]) -> None:
    with thread_server(chat_artifact, tmp_path, admin=AdminOptions(uds=tmp_path / "admin")):
        operators = ServerClient(f"unix:{tmp_path / 'admin'}")
        response = operators.http.post("/start_profile")
        assert response.status_code == 400 and "--profile-dir" in response.json()["error"]["message"]
        operators.http.close()


@pytest.mark.slow
def test_sleep_frees_the_memory_of_a_process(chat_artifact: Path, tmp_path: Path) -> None:
    server = HttpServer(chat_artifact, tmp_path / "log", "--admin-uds", tmp_path / "admin")
    operators = ServerClient(f"unix:{tmp_path / 'admin'}")
    operated = Operated(server, operators, tmp_path)
    try:
        first = server.engine_process()
        operated.order("/sleep", level=2)
        assert not Path(f"/proc/{first}").exists(), "the engine process has not ended"
        operated.order("/wake_up")
        second = server.engine_process()
        assert second != first and server.complete(max_tokens=2).status_code == 200
        # A paused engine that dies is paused again.
        operated.order("/pause", mode="keep")
        os.kill(second, signal.SIGKILL)
        until(lambda: server.gauge("num_requests_running") == 0 and _starts_again(server, second), 60)
        late = operated.begin(max_tokens=2)
        server.until_gauge("num_requests_waiting", 1, 10)
        operated.order("/resume")
        assert late.result(60).status_code == 200
        operated.order("/pause", mode="keep")
        assert server.stop() == 0, "a paused server drains"
        assert not (tmp_path / "admin").exists()
    finally:
        operators.http.close()
        server.close()


def _starts_again(server: HttpServer, before: int) -> bool:
    """Whether a new engine process has loaded the model."""
    info = server.http.get("/server_info").json()["engine"]
    return info["state"] == "ready" and info["restarts"] == 1 and server.engine_process() != before
