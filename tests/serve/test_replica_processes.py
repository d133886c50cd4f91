"""pico with two replicas in processes of their own: one that is killed under load, and the cached tokens of both."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from http_server import HttpServer, until
from prometheus_client.parser import text_string_to_metric_families
from run_seed import run_seed

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("pico-replicas")]
PICO = Path(__file__).parents[2] / "models" / "pico"


@pytest.fixture(scope="module")
def pico(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from ingot import compile_model

    folder = tmp_path_factory.mktemp("pico") / "pico.ingot"
    compile_model(PICO, folder, target="cpu", jobs=1)
    return folder


@contextmanager
def serving(pico: Path, log: Path, replicas: int) -> Iterator[HttpServer]:
    server = HttpServer(pico, log, "--replicas", replicas)
    try:
        yield server
        assert server.stop() == 0
    finally:
        server.close()


def states(server: HttpServer) -> list[str]:
    return [one["state"] for one in server.http.get("/server_info").json()["engine"]["replicas"]]


def samples(server: HttpServer, name: str) -> list[float]:
    """The values of a metric, one of each replica."""
    families = text_string_to_metric_families(server.http.get("/metrics").text)
    return [one.value for family in families for one in family.samples if one.name == name]


def test_each_replica_has_its_cores(pico: Path, tmp_path: Path) -> None:
    with serving(pico, tmp_path / "log", 2) as server:
        shares = [os.sched_getaffinity(process) for process in server.engine_processes()]
        assert len(shares) == 2 and not shares[0] & shares[1]
        assert shares[0] | shares[1] == os.sched_getaffinity(0)


def test_a_replica_that_is_killed_under_load(pico: Path, tmp_path: Path) -> None:
    """Requests that had not begun succeed, and only streams with an event end with an error. The replica comes back."""
    outcomes: list[tuple[bool, int, list[str]]] = []

    async def one(client: httpx.AsyncClient, number: int) -> None:
        stream = number % 2 == 0
        fields = {"prompt": f"def f{number}(", "max_tokens": 100, "ignore_eos": True, "stream": stream}
        if not stream:
            outcomes.append((False, (await client.post("/v1/completions", json=fields)).status_code, []))
            return
        async with client.stream("POST", "/v1/completions", json=fields) as answer:
            lines = [line async for line in answer.aiter_lines() if line]
            outcomes.append((True, answer.status_code, lines))

    def both_generate() -> bool:
        generated = samples(server, "vllm:generation_tokens_total")
        return len(generated) == 2 and all(generated)

    async def load(kill: Callable[[], None]) -> None:
        limits = httpx.Limits(max_connections=100)
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
            first = [asyncio.create_task(one(client, number)) for number in range(80)]
            await asyncio.to_thread(until, both_generate, 60)  # some run, and some wait
            kill()
            later = [asyncio.create_task(one(client, number)) for number in range(80, 100)]
            await asyncio.gather(*first, *later)

    with serving(pico, tmp_path / "log", 2) as server:
        killed = server.engine_processes()[0]
        asyncio.run(load(lambda: os.kill(killed, signal.SIGKILL)))
        assert len(outcomes) == 100 and all(status == 200 for _, status, _ in outcomes)
        cut = 0
        for stream, _, lines in outcomes:
            if stream:
                assert lines[-1] == "data: [DONE]"
                last = json.loads(lines[-2].removeprefix("data: "))
                if "error" in last:
                    assert last["error"]["code"] == "engine_unavailable" and len(lines) > 2
                    cut += 1
        assert cut > 0, "the killed replica had begun some streams"
        until(lambda: states(server) == ["ready", "ready"], 60)
        assert killed not in server.engine_processes() and len(server.engine_processes()) == 2
        assert [server.complete(max_tokens=3, prompt=text).status_code for text in "abcd"] == [200] * 4


def cached_tokens(server: HttpServer) -> float:
    """The tokens of eight conversations of six turns that replicas find in their caches; four run at a time."""

    def talk(number: int) -> None:
        draw = random.Random(f"{run_seed()} {number}")
        prompt = [random.Random(f"{run_seed()} system {number % 3}").randrange(256, 4000) for _ in range(200)]
        for _ in range(6):
            prompt += (draw.randrange(256, 4000) for _ in range(40))
            fields = {"max_tokens": 20, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
            answer = client.post("/v1/completions", json={"prompt": prompt, **fields})
            prompt += answer.raise_for_status().json()["choices"][0]["token_ids"]

    with server.client() as client, ThreadPoolExecutor(4) as threads:
        list(threads.map(talk, range(8)))
    return sum(samples(server, "vllm:prefix_cache_hits_total"))


def test_two_replicas_find_what_one_finds(pico: Path, tmp_path: Path) -> None:
    found = []
    for replicas in (1, 2):
        with serving(pico, tmp_path / f"log{replicas}", replicas) as server:
            found.append(cached_tokens(server))
    print(f"cached tokens: {found[0]:.0f} with one replica, {found[1]:.0f} with two")
    assert found[1] >= 0.9 * found[0] > 0
