"""Two replicas of a model: what one does when the other dies, pauses or is full, and what operators see."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from http_server import ServerClient, until
from prometheus_client.parser import text_string_to_metric_families
from thread_server import EngineThread, ThreadServer, thread_server

from ingot import AsyncLLM
from ingot.ir.errors import EngineDeadError, OptionError, QueueFullError
from ingot.serve.async_llm import make_engine
from ingot.serve.engine.client import EngineLimits
from ingot.serve.engine.delta_stream import DeltaStream
from ingot.serve.http.admin.options import AdminOptions

pytestmark = [pytest.mark.xdist_group("serve"), pytest.mark.one_in_file(3)]
THREADS = pytest.mark.usefixtures("engine_thread")
LONG = {"max_tokens": 3000, "ignore_eos": True}


@contextlib.asynccontextmanager
async def two(artifact: Path, **options: Any) -> AsyncIterator[tuple[AsyncLLM, list[EngineThread]]]:
    """A model with two replicas, and their engines' threads."""
    before = len(EngineThread.started)
    async with AsyncLLM(artifact, replicas=2, **options) as llm:
        yield llm, EngineThread.started[before:]


def thread_of(index: int, threads: list[EngineThread]) -> EngineThread:
    """The thread of the replica `index`, which has the core `index` of two shares."""
    return sorted(threads, key=lambda one: one.place.cores or ())[index]


def begin(llm: AsyncLLM, tokens: list[int], *, stream: bool = True, **params: Any) -> DeltaStream:
    return llm.engine.add(tokens, {**LONG, **params}, 1, stream=stream)


async def rest(stream: DeltaStream) -> int:
    """The number of tokens that are still to come."""
    return sum([len(delta.token_ids) async for deltas in stream for delta in deltas])


@THREADS
def test_requests_that_had_not_begun_move(chat_artifact: Path) -> None:
    """A whole answer, and streams that wait for a place in a step; a stream with a delta ends with an error."""

    async def body() -> None:
        async with two(chat_artifact, max_num_seqs=1) as (llm, threads):
            running = [begin(llm, [index + 1] * 20) for index in range(2)]
            assert {one.engine for one in running} == {0, 1}
            for one in running:
                await anext(one)
            dies = running[0].engine
            waiting = [begin(llm, [9 + index] * 20, max_tokens=5, stream=bool(index % 2)) for index in range(6)]
            moved = [one for one in waiting if one.engine == dies]
            assert len(moved) == 3
            thread_of(dies, threads).kill()
            with pytest.raises(EngineDeadError):
                await rest(running[0])
            assert all(one.engine == 1 - dies for one in waiting) and llm.engine.state == "ready"
            running[1].close()  # lets the others run
            assert [await rest(one) for one in waiting] == [5] * 6
            while llm.engine.engines[dies].state != "ready":
                await llm.engine.state_change()
            assert [one.restarts for one in llm.engine.engines] == [int(index == dies) for index in range(2)]
            assert await rest(begin(llm, [1] * 20, max_tokens=3)) == 3
            assert llm.engine.num_unfinished == 0 and [one.num_sequences for one in llm.engine.engines] == [0, 0]

    asyncio.run(body())


@THREADS
def test_a_request_moves_once(chat_artifact: Path) -> None:
    """A request that kills engines ends with an error when the second one dies. It can be aborted after a move."""

    async def body() -> None:
        async with two(chat_artifact, max_num_seqs=1) as (llm, threads):
            for index in range(2):
                await anext(begin(llm, [index + 1] * 20))
            fatal, left = begin(llm, [7] * 20), begin(llm, [8] * 20)
            first = fatal.engine
            assert left.engine == 1 - first
            thread_of(first, threads).kill()
            await llm.engine.state_change()
            assert fatal.engine == 1 - first and not fatal.ended
            left.close()
            second = begin(llm, [6] * 20)
            assert second.engine == 1 - first, "the other one is not ready"
            second.close()
            thread_of(1 - first, threads).kill()
            with pytest.raises(EngineDeadError):
                await rest(fatal)

    asyncio.run(body())


@THREADS
def test_no_replica_is_ready(chat_artifact: Path) -> None:
    async def body() -> None:
        async with two(chat_artifact) as (llm, threads):
            streams = [begin(llm, [index + 1] * 20) for index in range(2)]
            for one in streams:
                await anext(one)
            for thread in threads:
                thread.kill()
            for one in streams:
                with pytest.raises(EngineDeadError):
                    await rest(one)
            with pytest.raises(EngineDeadError, match="is starting"):
                begin(llm, [1] * 20)
            while {one.state for one in llm.engine.engines} != {"ready"}:
                await llm.engine.state_change()
            assert await rest(begin(llm, [1] * 20, max_tokens=3)) == 3

    asyncio.run(body())


@THREADS
def test_the_queue_is_that_of_all(chat_artifact: Path) -> None:
    async def body() -> None:
        async with two(chat_artifact, max_num_seqs=1, limits=EngineLimits(max_waiting=2)) as (llm, threads):
            streams = [begin(llm, [5] * 40) for _ in range(4)]
            assert sorted(one.engine for one in streams) == [0, 0, 1, 1]
            with pytest.raises(QueueFullError, match="4 sequences run or wait"):
                begin(llm, [5] * 40)
            while not (begun := [one for one in streams if one.begun]):
                await asyncio.sleep(0.01)
            dies = begun[0].engine
            waiting = [one for one in streams if not one.begun]
            thread_of(dies, threads).kill()
            await llm.engine.state_change()
            assert all(one.engine == 1 - dies and not one.ended for one in waiting), "accepted before, they all move"
            with pytest.raises(QueueFullError):
                begin(llm, [5] * 40)
            for one in streams:
                one.close()
            begin(llm, [5] * 40).close()

    asyncio.run(body())


@THREADS
def test_a_conversation_finds_its_pages(chat_artifact: Path) -> None:
    """Each of several conversations stays with its replica, which finds all full pages of the earlier turn."""

    async def body() -> None:
        async with two(chat_artifact) as (llm, _):
            page = llm.model.facts["model"]["page_size"]
            talks = [[index] * 3 * page for index in range(4)]
            params = {"max_tokens": page, "temperature": 0.0, "ignore_eos": True}
            places: list[set[int]] = [set() for _ in talks]
            for turn in range(3):
                for index, talk in enumerate(talks):
                    stream = llm.engine.add(talk, params, 1, stream=False)
                    places[index].add(stream.engine)
                    (delta,) = [delta async for deltas in stream for delta in deltas]
                    assert (delta.num_cached or 0) >= (len(talk) - 2 * page if turn else 0)
                    talk += [*delta.token_ids, *[index] * page]
            assert all(len(one) == 1 for one in places) and len({min(one) for one in places}) == 2

    asyncio.run(body())


@THREADS
def test_a_replica_that_cannot_start_ends_the_start(chat_artifact: Path) -> None:
    async def body() -> None:
        with pytest.raises(OptionError):
            async with two(chat_artifact, max_num_seqs=9999):
                pytest.fail("it started")
        assert not any(thread.alive for thread in EngineThread.started[-2:])

    asyncio.run(body())


@pytest.mark.parametrize("replicas", [0, -1, 1.5, "2"])
def test_bad_numbers(chat_artifact: Path, replicas: Any) -> None:
    with pytest.raises(OptionError, match="replicas"):
        AsyncLLM(chat_artifact, replicas=replicas)
    with pytest.raises(OptionError, match="--replicas is 9999"):
        AsyncLLM(chat_artifact, replicas=9999)


def test_one_replica_is_an_engine(chat_artifact: Path) -> None:
    """Nothing stands between the server and the only engine."""
    llm = AsyncLLM(chat_artifact)
    assert llm.engine.engines == (llm.engine,)
    assert make_engine(llm.model, {}, EngineLimits(), 2).engines[1].index == 1


class Served:
    """A server of two replicas, with its operators' socket."""

    def __init__(self, server: ThreadServer, admin: ServerClient) -> None:
        self.server, self.admin = server, admin

    def get(self, path: str) -> Any:
        return self.server.http.get(path).json()

    def order(self, path: str, status: int = 200) -> Any:
        answer = self.admin.http.post(path)
        assert answer.status_code == status, answer.text
        return answer.json()

    def samples(self, name: str) -> dict[str, float]:
        """The values of a metric by engine."""
        families = text_string_to_metric_families(self.server.http.get("/metrics").text)
        return {one.labels["engine"]: one.value for family in families for one in family.samples if one.name == name}


@pytest.fixture(scope="module")
def served(
    chat_artifact: Path, tmp_path_factory: pytest.TempPathFactory, engine_thread: type[EngineThread]
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("replicas")
    admin = AdminOptions(uds=folder / "admin", profile_dir=folder / "profiles")
    with thread_server(chat_artifact, folder, admin=admin, replicas=2) as server:
        until(lambda: server.http.get("/server_info").json()["engine"]["replicas"][1]["state"] == "ready", 20)
        operators = ServerClient(f"unix:{folder / 'admin'}")
        yield Served(server, operators)
        operators.http.close()


def test_metrics_have_an_engine(served: Served) -> None:
    before = served.samples("vllm:generation_tokens_total")
    assert before.keys() == {"0", "1"}
    for prompt in ("a", "b"):
        served.server.complete(prompt=prompt, max_tokens=4, ignore_eos=True)
    after = served.samples("vllm:generation_tokens_total")
    assert sorted(after[engine] - before[engine] for engine in after) == [4, 4]
    until(lambda: served.samples("vllm:kv_cache_usage_perc") == {"0": 0, "1": 0}, 20)  # the counts follow the answer
    assert served.samples("ingot:engine_ready") == {"0": 1, "1": 1}


def test_what_the_server_says_of_replicas(served: Served) -> None:
    info = served.get("/server_info")["engine"]
    assert [one["state"] for one in info["replicas"]] == ["ready", "ready"]
    assert all(one["place"].startswith("core") and one["start_seconds"]["ready"] > 0 for one in info["replicas"])
    assert served.get("/load") == {"server_load": 0, "replicas": [0, 0]}


def test_operators_order_all_replicas(served: Served) -> None:
    engines = served.server._llm.engine.engines
    served.order("/pause?mode=keep")
    assert all(one.paused for one in engines) and served.server.http.get("/ready").status_code == 503
    served.order("/resume")
    assert not any(one.paused for one in engines) and served.server.http.get("/ready").status_code == 200
    emptied = [one.emptied for one in engines]
    served.order("/reset_prefix_cache")
    assert [one.emptied for one in engines] == [count + 1 for count in emptied]
    served.order("/sleep")
    assert {one.state for one in engines} == {"sleeping"} and served.admin.http.get("/is_sleeping").json()
    assert served.server.http.get("/health").status_code == 200
    assert served.server.complete(max_tokens=1).status_code == 503
    served.order("/wake_up")
    assert {one.state for one in engines} == {"ready"}
    assert served.server.complete(max_tokens=1).status_code == 200


def test_each_replica_has_a_profile(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engines are threads of one process here, of which PyTorch makes one profile at a time."""
    orders: list[tuple[int, str, str]] = []
    for one in served.server._llm.engine.engines:

        async def order(action: str, argument: str = "", index: int = one.index) -> None:
            orders.append((index, action, argument))

        monkeypatch.setattr(one, "order", order)
    served.order("/start_profile")
    paths = served.order("/stop_profile")["paths"]
    assert [path.rpartition("-")[2] for path in paths] == ["0.json", "1.json"]
    assert orders[:2] == [(0, "profile", ""), (1, "profile", "")]
    assert orders[2:] == [(0, "stop_profile", paths[0]), (1, "stop_profile", paths[1])]


def test_a_replica_that_starts_during_a_pause_is_paused(served: Served) -> None:
    engines = served.server._llm.engine.engines
    served.order("/pause?mode=keep")
    before = sum(one.restarts for one in engines)
    EngineThread.started[-1].kill()
    until(lambda: sum(one.restarts for one in engines) == before + 1, 20)
    until(lambda: {one.state for one in engines} == {"ready"}, 20)
    assert served.server.http.get("/ready").status_code == 503
    waiting = [threading.Thread(target=served.server.complete, kwargs={"prompt": text}) for text in "ab"]
    for one in waiting:
        one.start()
    until(lambda: served.samples("vllm:num_requests_waiting") == {"0": 1, "1": 1}, 10)
    served.order("/resume")
    for one in waiting:
        one.join(20)
    assert served.get("/load")["server_load"] == 0
