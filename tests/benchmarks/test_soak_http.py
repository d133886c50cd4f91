"""The soak over HTTP: what its clients do, and what it fails for."""

from __future__ import annotations

import asyncio
import importlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def soak(benchmarks: None) -> ModuleType:
    return importlib.import_module("soak_http")


@pytest.fixture
def mix(benchmarks: None) -> ModuleType:
    return importlib.import_module("soak_mix")


@pytest.fixture
def client(benchmarks: None) -> ModuleType:
    return importlib.import_module("soak_client")


def test_the_mix_is_drawn_by_seed(mix: ModuleType) -> None:
    def drawn(seed: str) -> list[Any]:
        return list(mix.mixed_requests(50.0, 20.0, "m", (256, 2000), 200, seed))

    found = drawn("a")
    assert found == drawn("a") != drawn("b")
    kinds = Counter(one.kind for one in found)
    assert kinds.keys() == mix.SHARES.keys() and abs(len(found) - 1000) < 200
    assert abs(kinds["stream"] / len(found) - 0.7) < 0.1
    assert [one.arrival for one in found] == sorted(one.arrival for one in found) and found[-1].arrival < 20
    for one in found:
        if one.kind == "bad":
            assert b"%b" not in one.body and one.output == 0
            continue
        body = json.loads(one.body)
        assert len(body["prompt"]) + body["max_tokens"] <= 200 and body["max_tokens"] == one.output > 0
        assert all(256 <= token < 2000 for token in body["prompt"])
        assert ("stream" in body) == (one.kind != "whole") and ("logprobs" in body) == (one.kind == "slow")


TOKENS = 3
USAGE = {"completion_tokens": TOKENS}


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer as an OpenAI server does: prompts that begin with 7 get status 500, bodies without a prompt 400."""
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
            body = json.loads(await reader.readexactly(length))
            if "prompt" not in body or body["prompt"][0] == 7:
                writer.write(b"HTTP/1.1 %d no\r\nContent-Length: 2\r\n\r\n{}" % (500 if "prompt" in body else 400))
            elif "stream" not in body:
                text = json.dumps({"usage": USAGE}).encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(text), text))
            else:
                writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
                events = [*[{"choices": [1]}] * TOKENS, {"choices": [], "usage": USAGE}]
                for text in (*(json.dumps(one) for one in events), "[DONE]"):
                    event = f"data: {text}\n\n".encode()
                    writer.write(b"%x\r\n%b\r\n" % (len(event), event))
                    await writer.drain()
                    await asyncio.sleep(0.005)
                writer.write(b"0\r\n\r\n")
    except (asyncio.IncompleteReadError, OSError):
        pass
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("kind", "first", "output", "status", "tokens", "fault"),
    [
        ("stream", 1, TOKENS, 200, TOKENS, ""),
        ("stream", 1, 5, 200, TOKENS, "status 200, 3 of 5 tokens"),
        ("stream", 7, TOKENS, 500, 0, "status 500, 0 of 3 tokens"),
        ("whole", 1, TOKENS, 200, TOKENS, ""),
        ("cancel", 1, TOKENS, 200, 0, ""),
        ("cancel", 7, TOKENS, 500, 0, "status 500"),
        ("slow", 1, TOKENS, 200, 0, ""),
        ("drop", 1, TOKENS, 0, 0, ""),
        ("bad", None, 0, 400, 0, ""),
        ("bad", 1, 0, 200, 0, "a bad body was answered with status 200"),
    ],
)
@pytest.mark.parametrize("reset", [False, True])
def test_how_a_request_ends(
    kind: str,
    first: int | None,
    output: int,
    status: int,
    tokens: int,
    fault: str,
    reset: bool,
    client: ModuleType,
    mix: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fields = {} if first is None else {"prompt": [first]}
    streamed = {} if kind in ("whole", "bad") else {"stream": True}
    body = json.dumps({**fields, **streamed}).encode()
    asked = mix.Mixed(0.0, kind, body, output, stop=0.1 if kind == "slow" else 1.0 * (kind == "cancel"), reset=reset)

    def requests(*_: object) -> Iterator[Any]:
        yield asked

    async def run() -> list[Any]:
        server = await asyncio.start_server(_serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        begin = client.time.monotonic()
        work = client.Work("127.0.0.1", port, "m", begin, 1.0, 1.0, (256, 300), 64, "seed")
        ended: list[Any] = await client.Client(work).run()
        server.close()
        return ended

    monkeypatch.setattr(client, "mixed_requests", requests)
    (one,) = asyncio.run(run())
    assert (one.kind, one.status, one.tokens, one.fault) == (kind, status, tokens, fault)
    assert (one.first > 0) == (kind in ("stream", "cancel") or (kind == "slow"))


def test_what_a_soak_over_http_fails_for(soak: ModuleType) -> None:
    held = soak.ProcessSample(10**8, 20, 5)
    idle = soak.Sample(0.0, held, held, 0.0, 0.0, 0.0)
    done = soak.Ended("stream", 1.0, 200, 0.1, 0.2, 3, "")
    samples = [replace(idle, moment=float(second), running=3.0) for second in range(30)]
    fine = soak.Soaked([done] * 5, samples, idle, idle, [10**9] * 12, 0)
    assert list(soak.failures(fine)) == []
    figures = soak.figures(fine)
    assert figures["requests"].value == 5 and figures["running"].value == 3 and figures["tokens"].value == 15
    more = replace(held, anonymous=2 * 10**8)
    grown = [*samples[:20], *(replace(one, engine=more) for one in samples[20:])]
    wrong = [
        replace(fine, ended=[done, replace(done, fault="broke")]),
        replace(fine, ended=[done, replace(done, status=503)]),
        replace(fine, ended=[]),
        replace(fine, samples=grown),
        replace(fine, device=[10**9] * 8 + [2 * 10**9] * 4),
        replace(fine, errors=1),
        *(replace(fine, after=replace(idle, **{name: 1.0})) for name in ("running", "waiting", "held")),
        replace(fine, after=replace(idle, server=replace(held, fds=21))),
        replace(fine, after=replace(idle, engine=replace(held, threads=6))),
    ]
    for one in wrong:
        assert len(list(soak.failures(one))) == 1, list(soak.failures(one))
    assert soak.Soaked([], grown, idle, idle, [], 0).growth("engine") == 10**8
