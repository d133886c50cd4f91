"""LoRA adapters over HTTP: names, loading on request, and what is refused."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from command_world import write_checkpoint
from http_server import until
from lora_folder import adapter_for, write_adapter
from thread_server import EngineThread, ThreadServer, thread_server

from ingot import AsyncLLM, LoRARequest, SamplingParams, compile_model
from ingot.cli.lora_modules import read_lora_modules
from ingot.ir.errors import AdapterError, OptionError

pytestmark = [pytest.mark.xdist_group("serve"), pytest.mark.one_in_file(3)]
GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, its artifact with two slots, and `adapters/` with two adapters and others that cannot be used."""
    folder = tmp_path_factory.mktemp("lora")
    checkpoint = write_checkpoint(folder / "tiny", max_position_embeddings=512)
    limits = {"max_batch": 4, "max_tokens": 64, "max_seq_len": 512, "trace": "none"}
    compile_model(
        checkpoint,
        folder / "a.ingot",
        target="cpu",
        backend="reference",
        jobs=1,
        max_loras=2,
        max_lora_rank=8,
        **limits,
    )
    for seed, name in enumerate(("sql", "poems")):
        adapter_for(checkpoint, folder / "adapters" / name, seed=seed, size=1.0)
    write_adapter(folder / "adapters" / "wide", {"model.layers.0.self_attn.q_proj": (4, 4)})
    adapter_for(checkpoint, folder / "outside", seed=5)
    (folder / "adapters" / "link").symlink_to(folder / "outside")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path, engine_thread: type[EngineThread]) -> Iterator[ThreadServer]:
    modules = {"sql": folder / "adapters" / "sql"}
    with thread_server(folder / "a.ingot", folder, lora_modules=modules, adapter_dir=folder / "adapters") as running:
        yield running


def text(server: ThreadServer, **fields: Any) -> str:
    response = server.complete(**{**GREEDY, **fields})
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["model"] == fields.get("model", "tiny")
    return str(answer["choices"][0]["text"])


def total(server: ThreadServer, metric: str) -> float:
    """The sum of a metric over all engines."""
    return sum(map(float, re.findall(rf"^{metric}\{{.*\}} (\S+)$", server.http.get("/metrics").text, re.MULTILINE)))


def post(server: ThreadServer, route: str, **fields: Any) -> tuple[int, str]:
    response = server.http.post(f"/v1/{route}_lora_adapter", json=fields)
    return response.status_code, response.text


def test_the_model_of_a_request_selects_the_adapter(server: ThreadServer) -> None:
    plain, adapted = text(server), text(server, model="sql")
    assert plain != adapted == text(server, model="sql")
    with ThreadPoolExecutor(6) as threads:
        both = [threads.submit(text, server, model=name) for name in ("tiny", "sql") * 3]
        assert [one.result() for one in both] == [plain, adapted] * 3
    chat = {**GREEDY, "model": "sql", "messages": [{"role": "user", "content": "go"}]}
    assert server.http.post("/v1/chat/completions", json=chat).json()["model"] == "sql"


def test_adapters_are_listed_with_their_parent(server: ThreadServer) -> None:
    cards = {one["id"]: one for one in server.http.get("/v1/models").json()["data"]}
    assert cards["tiny"]["parent"] is None and cards["sql"]["parent"] == "tiny"
    assert server.http.get("/v1/models/sql").json()["root"] == "sql"
    assert server.http.get("/v1/models/prose").status_code == 404


def test_an_adapter_is_loaded_and_unloaded_while_requests_run(server: ThreadServer) -> None:
    with ThreadPoolExecutor(3) as threads:
        running = [threads.submit(text, server, model="sql", max_tokens=200) for _ in range(2)]
        assert post(server, "load", lora_name="poems", lora_path="poems")[0] == 200
        poem = text(server, model="poems")
        assert poem not in (text(server), text(server, model="sql"))
        last = threads.submit(text, server, model="poems", max_tokens=200)
        server.until_gauge("num_requests_running", 3, 20) if not all(one.done() for one in running) else None
        assert post(server, "unload", lora_name="poems")[0] == 200
        assert len({one.result() for one in running}) == 1
        assert last.exception() is None and last.result().startswith(poem)
    assert server.complete(model="poems").status_code == 404
    assert post(server, "unload", lora_name="poems")[0] == 404


def test_what_cannot_be_loaded_is_refused_without_paths_of_this_machine(server: ThreadServer, folder: Path) -> None:
    refused: list[tuple[int, dict[str, Any]]] = [
        (400, {"lora_name": "sql", "lora_path": "sql"}),
        (400, {"lora_name": "tiny", "lora_path": "sql"}),
        (400, {"lora_name": "", "lora_path": "sql"}),
        (400, {"lora_name": "x\n", "lora_path": "sql"}),
        (400, {"lora_name": "x" * 201, "lora_path": "sql"}),
        (400, {"lora_name": "x", "lora_path": "../outside"}),
        (400, {"lora_name": "x", "lora_path": "sql/../../outside"}),
        (400, {"lora_name": "x", "lora_path": str(folder / "outside")}),
        (400, {"lora_name": "x", "lora_path": "link"}),
        (400, {"lora_name": "x", "lora_path": "."}),
        (400, {"lora_name": "x", "lora_path": "a\0b"}),
        (400, {"lora_name": "x", "lora_path": "a" * 5000}),
        (400, {"lora_name": "x", "lora_path": "wide"}),
        (400, {"lora_name": "x", "lora_path": "sql", "load_inplace": True}),
        (404, {"lora_name": "x", "lora_path": "nowhere"}),
        (400, {"lora_name": "x"}),
    ]
    for status, fields in refused:
        found, answer = post(server, "load", **fields)
        assert found == status and str(folder) not in answer, (fields, answer)
    assert server.complete(model="x").status_code == 404


def test_the_metric_names_the_adapters(server: ThreadServer) -> None:
    text(server, model="sql")
    assert 'vllm:lora_requests_info{engine="0",max_lora="2",running_lora_adapters="' in server.http.get("/metrics").text


def test_a_restarted_engine_has_its_adapters(folder: Path, tmp_path: Path, engine_thread: type[EngineThread]) -> None:
    modules = {"sql": folder / "adapters" / "sql"}
    with thread_server(folder / "a.ingot", tmp_path, lora_modules=modules) as running:
        before = text(running, model="sql")
        assert post(running, "load", lora_name="poems", lora_path="poems")[0] == 403
        EngineThread.started[-1].kill()
        for _ in range(400):
            response = running.complete(**GREEDY, model="sql")
            if response.status_code == 200:
                break
        assert response.json()["choices"][0]["text"] == before


def test_async_llm_loads_the_adapter_of_a_request(folder: Path, engine_thread: type[EngineThread]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)

    async def run() -> list[str]:
        async with AsyncLLM(folder / "a.ingot") as llm:
            found = []
            for name in (None, "sql", "poems", "sql", "nowhere"):
                asked = None if name is None else LoRARequest(name, 1, str(folder / "adapters" / name))
                async for output in llm.generate("go", params, lora_request=asked):
                    last = output.outputs[0].text
                found.append(last)
            return found

    with pytest.raises(AdapterError, match="no folder"):
        asyncio.run(run())


def test_an_adapter_that_cannot_be_loaded_stops_the_start(folder: Path, engine_thread: type[EngineThread]) -> None:
    async def run() -> None:
        async with AsyncLLM(folder / "a.ingot", lora_modules={"wide": folder / "adapters" / "wide"}):
            pass

    with pytest.raises(AdapterError, match="make a matrix"):
        asyncio.run(run())


@pytest.mark.parametrize("given", ["sql", "=x", "sql=", "tiny=x"])
def test_bad_lora_modules_are_refused(given: str) -> None:
    assert (
        json.dumps({name: str(path) for name, path in read_lora_modules(["a=b=c"], ["tiny"]).items()}) == '{"a": "b=c"}'
    )
    with pytest.raises(OptionError):
        read_lora_modules([given], ["tiny"])


def test_all_replicas_have_the_adapters(folder: Path, tmp_path: Path, engine_thread: type[EngineThread]) -> None:
    modules, below = {"sql": folder / "adapters" / "sql"}, folder / "adapters"
    with thread_server(folder / "a.ingot", tmp_path, lora_modules=modules, adapter_dir=below, replicas=2) as running:
        assert post(running, "load", lora_name="poems", lora_path="poems")[0] == 200
        assert post(running, "load", lora_name="wide", lora_path="wide")[0] == 400
        with ThreadPoolExecutor(8) as threads:
            found = [threads.submit(text, running, model=name) for name in ("sql", "poems") * 4]
            assert len({one.result() for one in found}) == 2
        EngineThread.started[-1].kill()
        until(lambda: total(running, "ingot:engine_restarts_total") == 1, 10)
        until(lambda: total(running, "ingot:engine_ready") == 2, 10)
        with ThreadPoolExecutor(8) as threads:
            again = [threads.submit(text, running, model="poems") for _ in range(4)]
            assert {one.result() for one in again} == {found[1].result()}
        assert post(running, "unload", lora_name="poems")[0] == 200
        assert running.complete(model="poems").status_code == 404
