"""Vectors over HTTP: embeddings, pooling, scores, rankings and classes; what is refused, and callers who leave."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import math
import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from http_server import HttpServer, ServerClient, until
from openai import OpenAI
from random_bodies import body
from run_seed import again, run_seed
from thread_server import EngineThread, thread_server

from ingot import LLM, AsyncLLM, PoolingParams
from ingot.ir.errors import RequestError
from ingot.runtime.engines.pooling_engine import PoolingEngine
from ingot.serve.engine.client import EngineLimits
from ingot.serve.http.routes.classify import ClassifyFields
from ingot.serve.http.routes.embeddings import EmbeddingFields, PooledFields
from ingot.serve.http.routes.scores import RerankFields, ScoreFields

pytestmark = pytest.mark.xdist_group("serve")
TEXTS = ["one", "a longer text", "x"]
ROUTES: dict[str, type[msgspec.Struct]] = {
    "/v1/embeddings": EmbeddingFields,
    "/pooling": PooledFields,
    "/classify": ClassifyFields,
    "/score": ScoreFields,
    "/rerank": RerankFields,
}


@pytest.fixture(scope="module")
def embedder(
    pooling_artifacts: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, engine_thread: type[EngineThread]
) -> Iterator[ServerClient]:
    with thread_server(pooling_artifacts["embed"], tmp_path_factory.mktemp("embed")) as server:
        yield server


@pytest.fixture(scope="module")
def classifier(
    pooling_artifacts: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, engine_thread: type[EngineThread]
) -> Iterator[ServerClient]:
    with thread_server(pooling_artifacts["classify"], tmp_path_factory.mktemp("classify")) as server:
        yield server


@pytest.fixture(scope="module")
def expected(pooling_artifacts: dict[str, Path]) -> dict[str, list[float]]:
    """The vector of each text, by `LLM.embed`."""
    outputs = LLM(pooling_artifacts["embed"]).embed(TEXTS)
    return {text: out.embedding for text, out in zip(TEXTS, outputs, strict=True)}


def close(found: list[float], wanted: list[float]) -> bool:
    """Vectors of other steps round differently."""
    return len(found) == len(wanted) and all(abs(a - b) < 1e-5 for a, b in zip(found, wanted, strict=True))


def dot(one: list[float], other: list[float]) -> float:
    return math.fsum(a * b for a, b in zip(one, other, strict=True))


def answer(server: ServerClient, path: str, **fields: Any) -> Any:
    response = server.http.post(path, json=fields)
    assert response.status_code == 200, response.text
    return response.json()


def test_embeddings_equal_those_of_llm(embedder: ServerClient, expected: dict[str, list[float]]) -> None:
    whole = answer(embedder, "/v1/embeddings", input=TEXTS, model="tiny")
    assert whole["object"] == "list" and whole["model"] == "tiny" and whole["id"].startswith("embd-")
    assert [one["index"] for one in whole["data"]] == [0, 1, 2]
    assert all(close(one["embedding"], expected[text]) for one, text in zip(whole["data"], TEXTS, strict=True))
    tokens = sum(map(len, TEXTS))  # one token a byte
    assert whole["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}
    ids = [embedder.http.post("/tokenize", json={"prompt": text}).json()["tokens"] for text in TEXTS[:2]]
    for given, texts in ((ids[1], TEXTS[1:2]), (ids, TEXTS[:2]), ([ids[0], TEXTS[1]], TEXTS[:2])):
        data = answer(embedder, "/v1/embeddings", input=given)["data"]
        assert all(close(one["embedding"], expected[text]) for one, text in zip(data, texts, strict=True))


def test_the_openai_client_reads_base64(embedder: ServerClient, expected: dict[str, list[float]]) -> None:
    with OpenAI(base_url="http://server/v1", api_key="none", http_client=embedder.client()) as client:
        found = client.embeddings.create(model="tiny", input=TEXTS[0])  # it sends encoding_format base64
        assert close(found.data[0].embedding, expected[TEXTS[0]])
        short = client.embeddings.create(model="tiny", input=TEXTS[:2], dimensions=5, encoding_format="float")
        for one, text in zip(short.data, TEXTS, strict=False):
            length = math.hypot(*expected[text][:5])
            assert close(one.embedding, [value / length for value in expected[text][:5]])
    text = answer(embedder, "/v1/embeddings", input="one", encoding_format="base64", dimensions=7)
    values = struct.unpack("<7f", base64.b64decode(text["data"][0]["embedding"]))
    assert abs(math.hypot(*values) - 1) < 1e-5
    raw = answer(embedder, "/v1/embeddings", input="one", use_activation=False)["data"][0]["embedding"]
    length = math.hypot(*raw)
    assert abs(length - 1) > 0.1 and close([value / length for value in raw], expected["one"])


def test_inputs_are_cut_and_chats_are_rendered(embedder: ServerClient) -> None:
    def vector(**fields: Any) -> Any:
        found = answer(embedder, "/v1/embeddings", **fields)
        return found["data"][0]["embedding"], found["usage"]["prompt_tokens"]

    last, first = vector(input="long"), vector(input="a lo")
    for side, wanted in ((None, last), ("left", last), ("right", first)):
        cut, count = vector(input="a long", truncate_prompt_tokens=4, truncation_side=side)
        assert close(cut, wanted[0]) and count == 4
    assert vector(input="x" * 100, truncate_prompt_tokens=-1)[1] == 64
    messages = [{"role": "user", "content": "hi"}]
    ids = embedder.http.post("/tokenize", json={"messages": messages, "add_generation_prompt": False}).json()["tokens"]
    assert close(vector(messages=messages)[0], vector(input=ids)[0])


def test_pooling_returns_the_same_vectors(embedder: ServerClient, expected: dict[str, list[float]]) -> None:
    found = answer(embedder, "/pooling", input=TEXTS, task="embed")
    assert found["id"].startswith("pool-") and {one["object"] for one in found["data"]} == {"pooling"}
    assert all(close(one["data"], expected[text]) for one, text in zip(found["data"], TEXTS, strict=True))


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents"), ("queries", "items")], ids="-".join)
def test_scores_are_cosines(
    embedder: ServerClient, expected: dict[str, list[float]], path: str, names: tuple[str, str]
) -> None:
    wanted = [dot(expected[TEXTS[0]], expected[text]) for text in TEXTS]
    found = answer(embedder, path, **{names[0]: TEXTS[0], names[1]: TEXTS})
    assert found["id"].startswith("score-") and found["usage"]["prompt_tokens"] == 3 + sum(map(len, TEXTS))
    assert close([one["score"] for one in found["data"]], wanted) and abs(wanted[0] - 1) < 1e-6
    pairs = answer(embedder, path, **{names[0]: TEXTS[:2], names[1]: TEXTS[1:]})["data"]
    both = [dot(expected[a], expected[b]) for a, b in itertools.pairwise(TEXTS)]
    assert close([one["score"] for one in pairs], both)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_ranked(embedder: ServerClient, expected: dict[str, list[float]], path: str) -> None:
    wanted = {text: dot(expected["x"], expected[text]) for text in TEXTS}
    documents = [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]]
    found = answer(embedder, path, query="x", documents=documents)["results"]
    assert [one["document"]["text"] for one in found] == sorted(TEXTS, key=lambda text: -wanted[text])
    assert found[0]["index"] == 2 and close([one["relevance_score"] for one in found], sorted(wanted.values())[::-1])
    (best,) = answer(embedder, path, query="x", documents=TEXTS, top_n=1, return_documents=False)["results"]
    assert best["index"] == 2 and "document" not in best


def test_classes_get_probabilities(classifier: ServerClient, pooling_artifacts: dict[str, Path]) -> None:
    logits = [out.embedding for out in LLM(pooling_artifacts["classify"]).embed(TEXTS)]
    found = answer(classifier, "/classify", input=TEXTS)
    assert found["id"].startswith("classify-")
    for one, wanted in zip(found["data"], logits, strict=True):
        total = math.fsum(map(math.exp, wanted))
        assert one["num_classes"] == 3 and close(one["probs"], [math.exp(value) / total for value in wanted])
    raw = answer(classifier, "/classify", input=TEXTS, use_activation=False)["data"]
    assert all(close(one["probs"], wanted) for one, wanted in zip(raw, logits, strict=True))
    pooled = answer(classifier, "/pooling", input=TEXTS, encoding_format="base64")["data"]
    assert close(list(struct.unpack("<3f", base64.b64decode(pooled[0]["data"]))), found["data"][0]["probs"])


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/embeddings", {}, "input"),
    ("/v1/embeddings", {"input": []}, "empty"),
    ("/v1/embeddings", {"input": ""}, "empty"),
    ("/v1/embeddings", {"input": [[]]}, "empty"),
    ("/v1/embeddings", {"input": ["a", 1]}, "mixed"),
    ("/v1/embeddings", {"input": [True]}, "mixed"),
    ("/v1/embeddings", {"input": [1.5]}, "mixed"),
    ("/v1/embeddings", {"input": [260]}, "token id 260"),
    ("/v1/embeddings", {"input": [[1, "a"]]}, "token id"),
    ("/v1/embeddings", {"input": {"a": 1}}, "input"),
    ("/v1/embeddings", {"input": ["a"] * 2049}, "2048"),
    ("/v1/embeddings", {"input": "x" * 65}, "maximum context length"),
    ("/v1/embeddings", {"input": "a", "messages": []}, "either"),
    ("/v1/embeddings", {"messages": []}, "messages"),
    ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
    ("/v1/embeddings", {"input": "a", "dimensions": 33}, "dimensions"),
    ("/v1/embeddings", {"input": "a", "dimensions": 10**30}, "dimensions"),
    ("/v1/embeddings", {"input": "a", "encoding_format": "bytes"}, "encoding_format"),
    ("/v1/embeddings", {"input": "a", "embed_dtype": "float16"}, "embed_dtype"),
    ("/v1/embeddings", {"input": "a", "endianness": "big"}, "endianness"),
    ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ("/v1/embeddings", {"input": "a", "truncation_side": "up"}, "truncation_side"),
    ("/v1/embeddings", {"input": "a", "normalize": True, "use_activation": False}, "normalize"),
    ("/v1/embeddings", {"input": "a", "priority": 1}, "priority"),
    ("/v1/embeddings", {"input": "a", "priority": 2**64}, "priority"),
    ("/score", {"queries": "a", "documents": ["b", "c"], "priority": -(2**64)}, "priority"),
    ("/v1/embeddings", {"input": "a", "cache_salt": ""}, "cache_salt"),
    ("/v1/embeddings", {"input": "a", "chat_template": "x"}, "chat_template"),
    ("/pooling", {"input": "a", "task": "token_embed"}, "task"),
    ("/pooling", {"input": "a", "task": "classify"}, "/v1/embeddings"),
    ("/classify", {"input": "a"}, "no class scores"),
    ("/score", {"text_1": "a"}, "expected"),
    ("/score", {"text_1": "a", "items": "b"}, "expected"),
    ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "2 text_1 and 3 text_2"),
    ("/score", {"text_1": [], "text_2": "a"}, "text_1"),
    ("/score", {"text_1": [1], "text_2": "a"}, "text_1"),
    ("/score", {"text_1": {"content": []}, "text_2": "a"}, "text_1"),
    ("/rerank", {"query": "a"}, "documents"),
    ("/rerank", {"query": ["a"], "documents": ["a"]}, "query"),
    ("/rerank", {"query": "a", "documents": ["a", ""]}, "documents"),
    ("/rerank", {"query": "a", "documents": ["a"], "top_n": -1}, "top_n"),
    ("/v1/completions", {"prompt": "a"}, "vectors and no tokens"),
    ("/v1/completions", {"prompt": "a", "stream": True}, "vectors and no tokens"),
    ("/v1/responses", {"input": "a"}, "vectors and no tokens"),
    ("/v1/responses", {"input": "a", "stream": True}, "vectors and no tokens"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "vectors and no tokens"),
]


@pytest.mark.parametrize(("path", "fields", "said"), BAD, ids=lambda one: str(one)[:40])
def test_requests_that_cannot_be_served(embedder: ServerClient, path: str, fields: dict[str, Any], said: str) -> None:
    response = embedder.http.post(path, json=fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error" and said in f"{error['message']} {error['param']}"
    embedder.until_idle()


def test_a_model_of_classes_makes_no_embeddings(classifier: ServerClient) -> None:
    for path, fields in (
        ("/v1/embeddings", {"input": "a"}),
        ("/score", {"text_1": "a", "text_2": "b"}),
        ("/rerank", {"query": "a", "documents": "b"}),
    ):
        response = classifier.http.post(path, json=fields)
        assert response.status_code == 400 and "/classify" in response.json()["error"]["message"]
    assert classifier.http.post("/pooling", json={"input": "a", "dimensions": 2}).status_code == 400


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling", "/classify", "/score", "/rerank"])
def test_a_text_model_makes_no_vectors(server: HttpServer, path: str) -> None:
    sides = {"query": "a", "documents": ["b"]} if path == "/rerank" else {"text_1": "a", "text_2": "b"}
    fields = {"input": "a"} if path not in ("/score", "/rerank") else sides
    response = server.http.post(path, json=fields)
    assert response.status_code == 400, response.text
    assert "generates tokens and makes no vectors" in response.json()["error"]["message"]


def check_random_bodies(server: ServerClient, count: int) -> None:
    draw = random.Random(run_seed())
    served = 0
    for _ in range(count):
        path = draw.choice([*ROUTES])
        sent = body(ROUTES[path], draw)
        answered = server.http.post(path, content=json.dumps(sent))
        assert answered.status_code < 500, (again(sent), path, answered.text)
        served += answered.status_code == 200
    assert served > count / 10
    server.until_idle()


def test_random_bodies(embedder: ServerClient) -> None:
    check_random_bodies(embedder, 100)


@pytest.mark.slow
def test_many_random_bodies(embedder: ServerClient) -> None:
    check_random_bodies(embedder, 3000)


def test_a_full_queue(pooling_artifacts: dict[str, Path], tmp_path: Path, engine_thread: type[EngineThread]) -> None:
    with thread_server(pooling_artifacts["embed"], tmp_path, limits=EngineLimits(max_waiting=3)) as server:
        assert server.http.post("/v1/embeddings", json={"input": ["a"] * 7}).status_code == 200  # a step has 4
        response = server.http.post("/v1/embeddings", json={"input": ["a"] * 8})
        assert response.status_code == 429 and response.headers["Retry-After"]
        assert server.http.get("/load").json() == {"server_load": 0}


def test_a_client_that_leaves(embedder: ServerClient) -> None:
    before = embedder.gauge("engine_steps_total")
    with embedder.sent("/v1/embeddings", input=["x" * 60] * 2000):
        until(lambda: embedder.load() > 0, 20)
    embedder.until_idle()
    assert embedder.gauge("engine_steps_total") - before < 500, "all of them ran: a step has 4"


def test_a_vector_that_is_not_finite(
    pooling_artifacts: dict[str, Path],
    tmp_path: Path,
    engine_thread: type[EngineThread],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = PoolingEngine._read
    monkeypatch.setattr(PoolingEngine, "_read", lambda self, handle: read(self, handle) * float("nan"))
    with thread_server(pooling_artifacts["embed"], tmp_path) as server:
        response = server.http.post("/v1/embeddings", json={"input": ["a", "b"]})
        assert response.status_code == 500 and "not finite" in response.json()["error"]["message"]
        server.until_idle()


def test_async_vectors(pooling_artifacts: dict[str, Path], engine_thread: type[EngineThread]) -> None:
    async def body() -> None:
        async with AsyncLLM(pooling_artifacts["embed"]) as llm:
            outputs = await asyncio.gather(*(llm.embed(text, PoolingParams(normalize=False)) for text in TEXTS))
            wanted = LLM(pooling_artifacts["embed"]).embed(TEXTS, PoolingParams(normalize=False))
            for one, other in zip(outputs, wanted, strict=True):
                assert close(one.embedding, other.embedding) and one.num_prompt_tokens == other.num_prompt_tokens
            with pytest.raises(RequestError, match="33 dimensions"):
                await llm.embed("a", PoolingParams(dimensions=33))
            with pytest.raises(RequestError, match="vectors and no tokens"):
                _ = [one async for one in llm.generate("a")]
            many = asyncio.gather(*(llm.embed("b" * 60) for _ in range(50)))
            await asyncio.sleep(0)
            many.cancel()
            with pytest.raises(asyncio.CancelledError):
                await many
            async with asyncio.timeout(20):
                while llm.engine.num_unfinished or llm.engine.stats.running:
                    await asyncio.sleep(0.005)

    asyncio.run(body())
