"""`/v1/messages`: Anthropic's form, against what the engine does without a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_server import HttpServer

from ingot import LLM, SamplingParams

pytestmark = pytest.mark.xdist_group("serve")
USER = {"role": "user", "content": "héllo"}
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.fixture(scope="module")
def llm(chat_artifact: Path) -> LLM:
    return LLM(chat_artifact)


def expected(llm: LLM, messages: list[dict[str, str]], *, continues: bool = False, **params: Any):
    (output,) = llm.chat(
        messages,
        SamplingParams(**{"temperature": 0.0, "max_tokens": 12, **params}),
        add_generation_prompt=not continues,
        continue_final_message=continues,
    )
    return output


def post(server: HttpServer, messages: list[Any], **fields: Any) -> httpx.Response:
    body = {"model": "tiny", "max_tokens": 12, "temperature": 0, "messages": messages, **fields}
    return server.http.post("/v1/messages", json={name: value for name, value in body.items() if value is not None})


def message(server: HttpServer, messages: list[Any], **fields: Any) -> dict[str, Any]:
    answer = post(server, messages, **fields)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def text(found: dict[str, Any]) -> str:
    (block,) = found["content"]
    assert block["type"] == "text"
    return str(block["text"])


def test_a_message(server: HttpServer, llm: LLM) -> None:
    found, output = message(server, [USER], system="Be brief."), expected(llm, [SYSTEM, USER])
    assert text(found) == output.outputs[0].text
    assert (found["type"], found["role"], found["model"]) == ("message", "assistant", "tiny")
    assert found["id"].startswith("msg_") and (found["stop_reason"], found["stop_sequence"]) == ("max_tokens", None)
    usage = found["usage"]
    cached = usage["cache_read_input_tokens"]
    assert usage["input_tokens"] + cached == len(output.prompt_token_ids) and usage["output_tokens"] == 12


@pytest.mark.parametrize(
    ("fields", "messages", "plain"),
    [
        (
            {"system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]},
            [{"role": "user", "content": [{"type": "text", "text": "héllo"}]}],
            [SYSTEM, USER],
        ),
        (
            {},
            [USER, USER, {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}],
            [
                {"role": "user", "content": "héllo\nhéllo"},
                {"role": "assistant", "content": "a"},
                {"role": "user", "content": "b"},
            ],
        ),
        ({"tools": [{"name": "f"}], "tool_choice": {"type": "none"}, "thinking": {"type": "disabled"}}, [USER], [USER]),
        ({"metadata": {"user_id": "me"}, "service_tier": "auto"}, [SYSTEM, USER], [SYSTEM, USER]),
    ],
    ids=["blocks", "turns", "no tools", "no effect"],
)
def test_forms_of_conversations(
    fields: dict[str, Any], messages: list[Any], plain: list[dict[str, str]], server: HttpServer, llm: LLM
) -> None:
    assert text(message(server, messages, **fields)) == expected(llm, plain).outputs[0].text


def test_a_message_continued(server: HttpServer, llm: LLM) -> None:
    messages = [USER, {"role": "assistant", "content": "Well,"}]
    assert text(message(server, messages)) == expected(llm, messages, continues=True).outputs[0].text


def test_the_reasons_of_the_end(server: HttpServer, llm: LLM) -> None:
    output = expected(llm, [USER]).outputs[0]
    stop = next(char for char in output.text[3:] if char not in output.text[:3])
    found = message(server, [USER], stop_sequences=["never", stop])
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", stop)
    assert text(found) == output.text[: output.text.index(stop)]
    found = message(server, [USER], temperature=1, seed=45, max_tokens=40)
    assert (found["stop_reason"], found["stop_sequence"]) == ("end_turn", None)
    found = message(server, [{"role": "user", "content": "x" * 4070}], max_tokens=1000)
    assert found["stop_reason"] == "model_context_window_exceeded"


def test_an_empty_message_has_no_content(server: HttpServer, llm: LLM) -> None:
    """The first token, as a stop token, ends the message before any text."""
    (first,) = expected(llm, [USER], max_tokens=1).outputs[0].token_ids
    found = message(server, [USER], stop_token_ids=[first])
    assert found["content"] == [] and found["stop_reason"] == "end_turn" and found["usage"]["output_tokens"] == 1
    types = [kind for kind, _ in events(post(server, [USER], stop_token_ids=[first], stream=True))]
    assert types == ["message_start", "message_delta", "message_stop"]


def events(answer: httpx.Response) -> list[tuple[str, dict[str, Any]]]:
    """The types and the data of a stream's events."""
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
    found = []
    for one in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = one.split("\n")
        content = json.loads(data.removeprefix("data: "))
        assert name == f"event: {content['type']}"
        found.append((content["type"], content))
    return found


def test_a_stream(server: HttpServer, llm: LLM) -> None:
    found, output = events(post(server, [USER], stream=True)), expected(llm, [USER])
    types = [kind for kind, _ in found]
    deltas = types.count("content_block_delta")
    expected_types = ["message_start", "content_block_start", *["content_block_delta"] * deltas]
    assert types == [*expected_types, "content_block_stop", "message_delta", "message_stop"] and deltas > 2
    start, last = found[0][1]["message"], found[-2][1]
    assert start["content"] == [] and start["stop_reason"] is None and start["id"].startswith("msg_")
    assert found[1][1]["content_block"]["text"] == ""
    parts = [content["delta"] for kind, content in found if kind == "content_block_delta"]
    assert {part["type"] for part in parts} == {"text_delta"}
    assert "".join(part["text"] for part in parts) == output.outputs[0].text
    assert last["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert last["usage"]["output_tokens"] == 12
    read = last["usage"]["cache_read_input_tokens"]
    assert start["usage"]["input_tokens"] + read == len(output.prompt_token_ids)


def test_counting_tokens(server: HttpServer, llm: LLM) -> None:
    body = {"model": "tiny", "system": "Be brief.", "messages": [USER]}
    counted = server.http.post("/v1/messages/count_tokens", json=body)
    assert counted.json() == {"input_tokens": len(expected(llm, [SYSTEM, USER], max_tokens=1).prompt_token_ids)}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages: "),
    ({"messages": "hi"}, "messages"),
    ({"messages": [3]}, "messages[0]"),
    ({"messages": [{"role": "king", "content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "text only"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": 1}]}]}, "tool_use_id"),
    ({"messages": [{"role": "assistant", "content": [{"type": "thinking", "thinking": 3}]}]}, "thinking"),
    ({"messages": [{"role": "user", "content": "x" * 5000}]}, "maximum context length"),
    ({"system": 3}, "system"),
    ({"system": [{"type": "image"}]}, "system[0]"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 4097}, "4096"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop"),
    ({"temperature": "hot"}, "temperature"),
    ({"tools": [{"name": "f"}]}, "tools"),
    ({"tool_choice": {"type": "any"}, "stream": False}, "tool_choice"),
    ({"tool_choice": {"type": ["auto"]}}, "tool_choice"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
    ({"output_config": {"effort": "high"}}, "output_config"),
    ({"container": "c"}, "container"),
    ({"stream": "yes"}, "stream"),
]


def checked(answer: httpx.Response, status: int, kind: str, found: str) -> None:
    """An error in Anthropic's form, with the id of the request."""
    assert answer.status_code == status, answer.text
    content = answer.json()
    assert content.keys() == {"type", "error", "request_id"} and content["type"] == "error"
    assert content["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    assert content["error"].keys() == {"type", "message"} and content["error"]["type"] == kind
    assert found in content["error"]["message"] and "\n" not in content["error"]["message"]


@pytest.mark.parametrize(("fields", "found"), BAD)
def test_bad_requests(fields: dict[str, Any], found: str, server: HttpServer) -> None:
    """The status is sent before a stream begins, so a stream has it too."""
    given = {"messages": [USER], "stream": True, **fields}
    checked(post(server, given.pop("messages"), **given), 400, "invalid_request_error", found)


def test_other_errors(server: HttpServer) -> None:
    checked(post(server, [USER], model="claude"), 404, "not_found_error", "claude")
    checked(server.http.get("/v1/messages/batches"), 404, "not_found_error", "batches")
    checked(server.http.get("/v1/messages"), 405, "invalid_request_error", "GET")
    checked(server.http.post("/v1/messages", content=b"{"), 400, "invalid_request_error", "JSON")
    checked(server.http.post("/v1/messages", content=b"x" * (17 << 20)), 413, "request_too_large", "too long")
    for path in ("/v1/messages/count_tokens", "/v1/messages"):
        checked(server.http.post(path, json={"max_tokens": 1}), 400, "invalid_request_error", "messages")
    body = {"messages": [USER], "max_tokens": 1}
    page = server.http.post("/v1/messages", json=body, headers={"origin": "http://evil.example"})
    checked(page, 403, "permission_error", "origin")
