"""Requests that cannot be served: the status that OpenAI uses, an error in its form, and a server that goes on."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

import pytest
from http_server import HttpServer

pytestmark = pytest.mark.xdist_group("serve")

HI = [{"role": "user", "content": "hi"}]
BAD_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": 3}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "empty"),
    ({"prompt": [[]]}, "empty"),
    ({"prompt": ["a", 1]}, "mixed"),
    ({"prompt": [1.5]}, "mixed"),
    ({"prompt": [-1]}, "token id -1"),
    ({"prompt": [260]}, "token id 260"),
    ({"prompt": [2**70]}, "token id"),
    ({"prompt": [True]}, "mixed"),
    ({"n": 0}, "n"),
    ({"n": 10**9}, "n"),
    ({"n": 129}, "n"),
    ({"n": "2"}, "n"),
    ({"n": 2, "temperature": 0}, "greedy"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": 10**30}, "logprobs"),
    ({"max_tokens": 10**9}, "maximum context length"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 4096}, "maximum context length"),
    ({"prompt": "x" * 5000}, "maximum context length"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": 1e39}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"frequency_penalty": 3}, "frequency_penalty"),
    ({"seed": 2**64}, "seed"),
    ({"stop": [""]}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop_token_ids": [260]}, "stop token id 260"),
    ({"stop_token_ids": list(range(200)), "min_tokens": 2}, "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": 1}, "stream_options"),
    ({"priority": 1}, "priority"),
    ({"priority": 10**30}, "priority"),
    ({"priority": -(2**64)}, "priority"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"suffix": "x"}, "suffix"),
    ({"logit_bias": {"a": 2.0}}, "logit_bias"),
    ({"logit_bias": {"999999999": 2.0}}, "logit_bias"),
    ({"bad_words": [" "]}, "bad_words"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"logit_bias": {"9" * 5000: 2.0}}, "logit_bias"),
    ({"logit_bias": {"5": -100.5}}, "logit_bias"),
    ({"typical_p": 0}, "typical_p"),
    ({"use_beam_search": True, "n": 11}, "beam"),
    ({"length_penalty": 0.5}, "use_beam_search"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.schema"),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "structured_outputs"),
    ({"structured_outputs": {}}, "no grammar is set"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "regex and choice are set together"),
    ({"structured_outputs": {"regex": "(a"}}, "unclosed group"),
    ({"structured_outputs": {"regex": "(a{1000}){1000}"}}, "too many expressions"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs"),
    ({"structured_outputs": {"xml": "a"}}, "unknown field"),
    ({"structured_outputs": {"json": "{"}}, "json is no JSON"),
    ({"structured_outputs": {"json": {"type": "array", "uniqueItems": True}}}, "uniqueItems"),
    ({"structured_outputs": {"json": {"$ref": "#"}}}, "no text matches it"),
    ({"structured_outputs": {"grammar": "start: nowhere"}}, "nowhere"),
    ({"structured_outputs": {"grammar": "neither"}}, "cannot be read"),
    ({"structured_outputs": {"structural_tag": {"format": {"type": "xml"}}}}, "structural tag has a format"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
]
BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "empty conversation"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [HI]}, "messages"),
    ({"messages": [{"role": "king", "content": "hi"}]}, "role"),
    ({"messages": [{"role": "user"}]}, "content"),
    ({"messages": [{"role": "user", "content": 3}]}, "content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "text"),
    ({"messages": HI, "chat_template": "{{ 1 }}"}, "chat template"),
    ({"messages": HI, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template"),
    ({"messages": HI, "chat_template_kwargs": {"a": "<end>"}}, "control token"),
    ({"messages": HI, "tools": [{"type": "function"}]}, "tools"),
    ({"messages": HI, "top_logprobs": 2}, "logprobs"),
    ({"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"messages": HI, "logprobs": 1}, "logprobs"),
    ({"messages": HI, "max_completion_tokens": 10**9}, "max_completion_tokens"),
    ({"messages": HI, "add_generation_prompt": True, "continue_final_message": True}, "together"),
    ({"messages": HI, "modalities": ["audio"]}, "modalities"),
]


def checked(response: Any, status: int, text: str) -> dict[str, Any]:
    """The error of a response, in OpenAI's form."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"} and isinstance(error["type"], str)
    assert text in error["message"] or text == error["param"], error
    assert "\n" not in error["message"] and "Traceback" not in error["message"]
    found: dict[str, Any] = error
    return found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "text"), BAD_COMPLETIONS)
def test_bad_completions(fields: dict[str, Any], text: str, stream: bool, server: HttpServer) -> None:
    """The status is sent before a stream begins, so a stream has it too."""
    checked(server.http.post("/v1/completions", json={"prompt": "go", "stream": stream, **fields}), 400, text)


@pytest.mark.parametrize(("fields", "text"), BAD_CHATS)
def test_bad_chats(fields: dict[str, Any], text: str, server: HttpServer) -> None:
    checked(server.http.post("/v1/chat/completions", json=fields), 400, text)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"prompt": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001,
        b'{"prompt": "a", "temperature": 1' + b"0" * 5000 + b"}",
    ],
    ids=lambda body: f"{body[:20]!r} of {len(body)}",
)
def test_bodies_that_are_no_request(body: bytes, server: HttpServer) -> None:
    checked(server.http.post("/v1/completions", content=body), 400, "")


def test_deep_messages(server: HttpServer) -> None:
    deep: Any = "x"
    for _ in range(100):
        deep = [deep]
    checked(server.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": deep}]}), 400, "")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", '{"messages": [{"role": "user", "content": %s}]}'),
        ("/v1/responses", '{"input": [%s]}'),
        ("/v1/responses", '{"input": "a", "tools": [%s], "tool_choice": "none", "max_output_tokens": 1}'),
        ("/v1/messages", '{"max_tokens": 1, "messages": [{"role": %s, "content": "a"}]}'),
    ],
)
def test_nested_bodies(path: str, body: str, server: HttpServer) -> None:
    """Near Python's limit of recursion, data that was decoded may fail in the next step: the error's text, or the
    answer."""
    for depth in (*range(900, 1000, 5), *range(960, 970), 129, 5000):
        for begin, end in (("[", "]"), ('{"a":', "}")):
            content = (body % (begin * depth + "1" + end * depth)).encode()
            answer = server.http.post(path, content=content)
            assert answer.status_code == 400 and "nested too deeply" in answer.json()["error"]["message"], depth


def test_a_prompt_of_invalid_unicode(server: HttpServer) -> None:
    body = json.dumps({"prompt": "\ud800"})
    checked(server.http.post("/v1/completions", content=body), 400, "")


def test_other_models_and_routes(server: HttpServer) -> None:
    for path, fields in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": HI})):
        error = checked(server.http.post(path, json={**fields, "model": "gpt-5"}), 404, "gpt-5")
        assert error["code"] == "model_not_found" and error["param"] == "model"
    checked(server.http.get("/v1/nothing"), 404, "/v1/nothing")
    refused = server.http.get("/v1/completions")
    checked(refused, 405, "GET")
    assert refused.headers["allow"] == "POST"


def test_a_body_above_the_cap(server: HttpServer) -> None:
    checked(server.http.post("/v1/completions", content=b"x" * (17 << 20)), 413, "too long")
    parts = (b"x" * (1 << 20) for _ in range(17))  # without a Content-Length
    checked(server.http.post("/v1/completions", content=parts), 413, "too long")


def raw(server: HttpServer, content: bytes) -> bytes:
    """What the server answers to bytes, until it closes the connection."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        with contextlib.suppress(ConnectionError):  # it has closed already
            connection.sendall(content)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while piece := connection.recv(1 << 16):
                answer += piece
    return answer


def test_a_flood_of_headers(server: HttpServer) -> None:
    many = b"".join(b"X-%d: %s\r\n" % (index, b"y" * 100) for index in range(2000))
    for head in (b"GET /health HTTP/1.1\r\n" + many, b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n"):
        answer = raw(server, head + b"\r\n")
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"].startswith("the headers are too long")


def test_bytes_that_are_no_http(server: HttpServer) -> None:
    assert raw(server, b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n").startswith(b"HTTP/1.1 400 ")


def test_the_server_is_unharmed(server: HttpServer) -> None:
    """After all of the above, in this file's order."""
    assert server.complete(max_tokens=3).status_code == 200
    assert server.http.get("/load").json() == {"server_load": 0}
    server.until_idle()
    assert "Traceback" not in server.log.read_text()
