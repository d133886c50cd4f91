"""The store of responses: bounded, and each API key sees its own; streams that end early are not stored."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_server import until
from run_seed import again, run_seed
from thread_server import EngineThread, ThreadServer, thread_server

from ingot.serve.http.responses_api import store as store_module
from ingot.serve.http.responses_api.store import ResponseStore, StoredResponse

pytestmark = pytest.mark.xdist_group("serve")
KEYS = ("first-key", "second-key")
USER = [{"role": "user", "content": "hi"}]


def stored(size: int) -> StoredResponse:
    return StoredResponse(b"x" * size, ())


def test_the_least_recently_used_is_dropped() -> None:
    store = ResponseStore(2)
    for name in ("a", "b"):
        store.put("me", name, stored(1))
    assert store.get("me", "a") is not None
    store.put("me", "c", stored(1))
    assert store.get("me", "b") is None
    assert store.get("me", "a") is not None and store.get("me", "c") is not None
    store.put("other", "a", stored(1))
    assert store.get("me", "a") is not None, "each owner has room of its own"
    assert store.delete("me", "a") and not store.delete("me", "a") and store.get("other", "a") is not None


def test_the_bytes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random calls, against a plain list."""
    monkeypatch.setattr(store_module, "MAX_BYTES", 1000)
    draw = random.Random(run_seed())
    store, kept = ResponseStore(8), list[tuple[str, int]]()
    for _ in range(2000):
        name, size = str(draw.randrange(20)), draw.randint(1, 400)
        known = dict(kept)
        match draw.randrange(3):
            case 0:
                store.put("me", name, stored(size))
                kept = [one for one in kept if one[0] != name] + [(name, size)]
                while len(kept) > 8 or sum(one[1] for one in kept) > 1000:
                    del kept[0]
            case 1:
                found = store.get("me", name)
                assert (None if found is None else found.size) == known.get(name), again("")
                if found is not None:
                    kept = [one for one in kept if one[0] != name] + [(name, found.size)]
            case _:
                assert store.delete("me", name) == (name in known), again("")
                kept = [one for one in kept if one[0] != name]


def test_a_response_above_the_bound_is_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAX_BYTES", 1000)
    store = ResponseStore(8)
    store.put("me", "a", StoredResponse(b"", ({"role": "user", "content": "x" * 1000},)))
    assert store.get("me", "a") is None
    store.put("me", "b", stored(1000))
    assert store.get("me", "b") is not None


@pytest.fixture(scope="module")
def keyed(
    chat_artifact: Path, tmp_path_factory: pytest.TempPathFactory, engine_thread: object
) -> Iterator[ThreadServer]:
    """A server with two keys that stores two responses of each."""
    folder = tmp_path_factory.mktemp("keyed")
    with thread_server(chat_artifact, folder, api_keys=KEYS, max_stored_responses=2) as running:
        running.http.headers["authorization"] = f"Bearer {KEYS[0]}"
        yield running


def respond(server: ThreadServer, key: str = KEYS[0], **fields: Any) -> httpx.Response:
    body = {"input": "hi", "max_output_tokens": 2, "temperature": 0, **fields}
    return server.http.post("/v1/responses", json=body, headers={"authorization": f"Bearer {key}"})


def read(server: ThreadServer, response_id: str, key: str = KEYS[0]) -> int:
    return server.http.get(f"/v1/responses/{response_id}", headers={"authorization": f"Bearer {key}"}).status_code


def test_each_key_sees_its_own_responses(keyed: ThreadServer) -> None:
    made = respond(keyed).json()["id"]
    assert read(keyed, made) == 200 and read(keyed, made, KEYS[1]) == 404
    headers = {"authorization": f"Bearer {KEYS[1]}"}
    assert keyed.http.delete(f"/v1/responses/{made}", headers=headers).status_code == 404
    other, unknown = respond(keyed, KEYS[1], previous_response_id=made), respond(keyed, previous_response_id="resp_no")
    assert other.status_code == unknown.status_code == 400
    messages = [answer.json()["error"]["message"].replace(made, "resp_no") for answer in (other, unknown)]
    assert messages[0] == messages[1], "the message does not say that another key has the response"
    assert respond(keyed, previous_response_id=made).status_code == 200


def test_keys_share_no_cached_prompts(keyed: ThreadServer) -> None:
    """On both routes: the time of an answer tells nothing about the prompts of another key."""
    cached: dict[tuple[str, str], list[int]] = {}
    body = {"messages": [{"role": "user", "content": "y" * 200}], "max_tokens": 1}
    for key in (*KEYS, *KEYS):
        usage = respond(keyed, key, input="z" * 200).json()["usage"]
        cached.setdefault(("responses", key), []).append(usage["input_tokens_details"]["cached_tokens"])
        answer = keyed.http.post("/v1/messages", json=body, headers={"authorization": f"Bearer {key}"})
        cached.setdefault(("messages", key), []).append(answer.json()["usage"]["cache_read_input_tokens"])
    assert all(first == 0 and second > 0 for first, second in cached.values()), cached


def test_old_responses_are_dropped(keyed: ThreadServer) -> None:
    other = respond(keyed, KEYS[1]).json()["id"]
    first, *later = (respond(keyed).json()["id"] for _ in range(3))
    assert read(keyed, first) == 404 and [read(keyed, one) for one in later] == [200, 200]
    assert read(keyed, other, KEYS[1]) == 200


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_the_key_header_of_anthropics_clients(keyed: ThreadServer, path: str) -> None:
    body = {"messages": USER, "max_tokens": 1}

    def status(authorization: str = "", **headers: str) -> int:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        answer = keyed.http.post(path, json=body, headers={"authorization": authorization, **given})
        if answer.status_code == 401:
            assert answer.json()["error"]["type"] == "authentication_error" and answer.json()["type"] == "error"
        return answer.status_code

    assert status(x_api_key=KEYS[0]) == status(x_api_key=KEYS[1]) == status(authorization=f"Bearer {KEYS[0]}") == 200
    assert status(x_api_key="wrong") == status(x_api_key="") == status() == 401
    assert status(authorization="Bearer wrong", x_api_key=KEYS[0]) == 401


def test_a_client_that_leaves_a_stream(keyed: ThreadServer) -> None:
    """Its request is aborted, and its response is not stored."""
    fields = {"input": "hi", "ignore_eos": True, "stream": True}
    with keyed.client() as client:
        client.headers = keyed.http.headers
        with client.stream("POST", "/v1/responses", json=fields) as answer:
            lines = answer.iter_lines()
            assert next(lines) == "event: response.created"
            made = json.loads(next(lines).removeprefix("data: "))["response"]["id"]
    keyed.until_idle()
    assert read(keyed, made) == 404, "the request ran to its end"


def test_an_engine_that_dies_in_a_stream(keyed: ThreadServer) -> None:
    """The stream's last event is an error in the form of its route."""
    last: dict[str, dict[str, Any]] = {}
    for path, fields in (
        ("/v1/responses", {"input": "hi", "max_output_tokens": 4000}),
        ("/v1/messages", {"messages": USER, "max_tokens": 4000}),
    ):
        until(lambda: keyed.http.get("/ready").status_code == 200, 30)
        with keyed.http.stream("POST", path, json={**fields, "ignore_eos": True, "stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            EngineThread.started[-1].kill()
            *_, data = (line for line in lines if line.startswith("data: "))
        last[path] = json.loads(data.removeprefix("data: "))
    failed = last["/v1/responses"]
    assert failed["type"] == "response.failed" and failed["response"]["status"] == "failed"
    assert failed["response"]["error"]["code"] == "server_error" and failed["response"]["error"]["message"]
    assert read(keyed, failed["response"]["id"]) == 404
    error = last["/v1/messages"]
    assert error["type"] == "error" and error["error"]["type"] == "overloaded_error" and error["request_id"]
