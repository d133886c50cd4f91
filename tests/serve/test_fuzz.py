"""Random bodies: each answer is a success or a client's error in OpenAI's form, and nothing stays occupied."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import msgspec
import pytest
from http_server import HttpServer
from random_bodies import body
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
    server.until_idle()
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
