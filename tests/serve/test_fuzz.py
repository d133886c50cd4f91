"""Random bodies: each answer is a success or a client's error in OpenAI's form, and nothing stays occupied."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from http_server import HttpServer
from run_seed import again, run_seed

from ingot.serve.http.messages_api.fields import CountFields, MessageFields
from ingot.serve.http.responses_api.fields import ResponseFields
from ingot.serve.http.routes.chat import ChatFields
from ingot.serve.http.routes.completions import CompletionFields
from ingot.serve.http.routes.tokens import DetokenizeFields, TokenizeFields

pytestmark = pytest.mark.xdist_group("serve")

ROUTES: dict[str, type[msgspec.Struct]] = {
    "/v1/completions": CompletionFields,
    "/v1/chat/completions": ChatFields,
    "/v1/responses": ResponseFields,
    "/v1/messages": MessageFields,
    "/v1/messages/count_tokens": CountFields,
    "/tokenize": TokenizeFields,
    "/detokenize": DetokenizeFields,
}
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 20, 21, 128, 129, 259, 260, 4097, 2**31, 2**63, 2**64, 10**30),
    *(0.0, 0.5, 1.0, -0.5, 1e-9, 2.0, 1e308, -1e308),
    *("", "a", "abc", "é🙂", "<end>", "x" * 3000, "tiny", "none", "text"),
    *([], [1], [1, 2, 3], ["a"], ["a", "b"], [[1, 2], [3]], [None], [[]], ["", "a"], [-1], [10**20]),
    *({}, {"a": 1}, {"type": "text"}, {"1": 1.0}, {"include_usage": True}, {"content": "a"}),
    *([{"role": "user", "content": "hi"}], [{"role": "user"}], [{"role": "assistant", "content": "a"}], [{}]),
)


def body(fields: type[msgspec.Struct], draw: random.Random) -> dict[str, Any]:
    """A request that is mostly valid, with a few fields of any value."""
    names = fields.__struct_fields__
    made: dict[str, Any] = {"max_output_tokens" if "input" in names else "max_tokens": draw.randint(1, 4)}
    if "input" in names:
        made["input"] = "hello"
    elif "prompt" in names:
        made["prompt"] = "hello"
    elif "tokens" in names:
        made["tokens"] = [1, 2]
    elif "messages" in names:
        made["messages"] = [{"role": "user", "content": "hi"}]
    for name in draw.sample(names, draw.randint(0, min(4, len(names)))):
        made[name] = draw.choice(VALUES)
    return made


def check(server: HttpServer, count: int) -> None:
    draw = random.Random(run_seed())
    served = 0
    for _ in range(count):
        path = draw.choice([*ROUTES])
        sent = body(ROUTES[path], draw)
        content = json.dumps(sent).encode()
        if draw.random() < 0.1:
            place = draw.randrange(len(content))
            content = content[:place] + bytes([draw.randrange(256)]) + content[place + draw.randint(0, 3) :]
        answer = server.http.post(path, content=content, timeout=120)  # up to 4096 tokens
        assert answer.status_code < 500, (again(content), path, answer.text)
        served += answer.status_code == 200
        if answer.status_code != 200:
            assert answer.json()["error"]["message"], (again(content), path)
    assert served > count / 10
    assert server.gauge("num_requests_running") == server.gauge("num_requests_waiting") == 0
    assert server.gauge("kv_cache_usage_perc") == 0 and server.http.get("/load").json() == {"server_load": 0}
    assert "Traceback" not in server.log.read_text()


def test_random_bodies(server: HttpServer) -> None:
    check(server, 150)


@pytest.mark.slow
def test_many_random_bodies(server: HttpServer) -> None:
    check(server, 100)  # starts the process of chat templates, and opens the connection
    before = descriptors(server)
    check(server, 5000)
    assert abs(descriptors(server) - before) <= 2, "the server leaks file descriptors"


def descriptors(server: HttpServer) -> int:
    return len(os.listdir(Path(f"/proc/{server.process.pid}/fd")))
