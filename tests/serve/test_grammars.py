"""Structured output over HTTP: all routes and forms, streams, grammars that are hostile, and the engine beside them."""

from __future__ import annotations

import json
import random
import re
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from http_server import HttpServer
from jsonschema import Draft202012Validator
from random_grammars import grammar_fields
from run_seed import again, run_seed

from ingot import LLM, SamplingParams
from ingot.runtime.grammar.compiled import Grammars
from ingot.serve.engine import process
from ingot.serve.engine.messages import SERVER_DECODER, Abort, Add, Frames, Refused, Start, Step, frame

pytestmark = [pytest.mark.xdist_group("serve"), pytest.mark.one_in_file(3)]

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "s": {"enum": ["x", "yy"]}},
    "required": ["n", "s"],
    "additionalProperties": False,
}
COMPACT = {"json": SCHEMA, "disable_any_whitespace": True}
HI = [{"role": "user", "content": "hi"}]


def value(text: str) -> Any:
    """The value in a text, which is one of SCHEMA."""
    found = json.loads(text)
    Draft202012Validator(SCHEMA).validate(found)
    return found


def test_completions(server: HttpServer) -> None:
    made = server.complete(prompt=["a", "b"], n=2, seed=3, max_tokens=200, structured_outputs=COMPACT).json()
    assert all(value(one["text"]) is not None and one["finish_reason"] == "stop" for one in made["choices"])
    assert len(made["choices"]) == 4
    for given, pattern in (
        ({"regex": "[ab]{3}"}, "[ab]{3}"),
        ({"choice": ["one", "two"]}, "one|two"),
        ({"grammar": 'root ::= "x" [0-9] "y"'}, "x[0-9]y"),
        ({"structural_tag": {"format": {"type": "const_string", "value": "<k>"}}}, "<k>"),
    ):
        (one,) = server.complete(prompt="a", max_tokens=50, structured_outputs=given).json()["choices"]
        assert re.fullmatch(pattern, one["text"]) and one["finish_reason"] == "stop"


def test_forced_tokens_change_no_output(chat_artifact: Path) -> None:
    """Several in a step, or each in its own: a model of weights, with sequences that follow no grammar beside."""
    schema = {**SCHEMA, "properties": {"n": SCHEMA["properties"]["n"], "a longer name": SCHEMA["properties"]["s"]}}
    grammar = {"json": {**schema, "required": ["n", "a longer name"]}, "disable_any_whitespace": True}
    params = [
        SamplingParams(temperature=float(place % 2), seed=place, max_tokens=60, structured_outputs=some)
        for place, some in enumerate([grammar, grammar, None, grammar, grammar, None])
    ]
    params = [one if one.structured_outputs else replace(one, max_tokens=12) for one in params]
    params += [replace(params[1], frequency_penalty=0.5, seed=9), replace(params[0], max_tokens=9)]
    steps: list[int] = []
    outputs: list[Any] = []
    llm = LLM(chat_artifact, enable_prefix_caching=False)
    scheduler = llm._engine._scheduler
    for most in (1, 32):
        scheduler.config = replace(scheduler.config, max_forced=most)
        before = llm._engine.steps_ended
        outputs.append([one.outputs[0] for one in llm.generate([f"{place}?" for place in range(8)], params)])
        steps.append(llm._engine.steps_ended - before)
        assert bool(llm.llm_engine.occupancy.forced_tokens) == (most > 1)
    assert outputs[0] == outputs[1] and "a longer name" in json.loads(outputs[0][1].text)
    assert steps[1] < steps[0] - 10


def test_forced_tokens_are_counted(server: HttpServer) -> None:
    def count() -> float:
        found = re.search(r"^ingot:forced_tokens_total{.*} (.*)$", server.http.get("/metrics").text, re.M)
        assert found
        return float(found[1])

    before = count()
    server.complete(prompt="a", max_tokens=50, structured_outputs={"choice": ["a longer text"]})
    assert count() == before + len("a longer text") - 1, "the first one is sampled, and so is the end"


def test_chats(server: HttpServer) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
    made = server.http.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 400, "response_format": form})
    (choice,) = made.json()["choices"]
    if choice["finish_reason"] == "stop":
        value(choice["message"]["content"])
    form = {"type": "json_object"}
    made = server.http.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 9, "response_format": form})
    assert made.json()["choices"][0]["message"]["content"].startswith("{")
    form = {
        "type": "structural_tag",
        "structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}],
        "triggers": ["<a"],
    }
    made = server.http.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 9, "response_format": form})
    assert made.status_code == 200, made.text
    fields = {"messages": HI, "max_tokens": 9, "response_format": {"type": "text"}, "temperature": 0}
    free = server.http.post("/v1/chat/completions", json=fields).json()["choices"]
    del fields["response_format"]
    assert free == server.http.post("/v1/chat/completions", json=fields).json()["choices"]


def test_streams(server: HttpServer) -> None:
    fields = {"prompt": "a", "max_tokens": 200, "structured_outputs": COMPACT, "seed": 5}
    (whole,) = server.complete(**fields).json()["choices"]
    text, reason = "", None
    with server.http.stream("POST", "/v1/completions", json={**fields, "stream": True}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                text, reason = text + choice["text"], choice["finish_reason"]
    assert (text, reason) == (whole["text"], "stop") and value(text) is not None


def test_responses_and_messages(server: HttpServer) -> None:
    form = {"type": "json_schema", "name": "a", "schema": SCHEMA}
    fields = {"input": "hi", "max_output_tokens": 400, "text": {"format": form}, "store": False}
    made = server.http.post("/v1/responses", json=fields).json()
    assert made["text"] == {"format": form}
    if made["status"] == "completed":
        value(made["output"][0]["content"][0]["text"])
    given = {"messages": HI, "max_tokens": 400, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
    made = server.http.post("/v1/messages", json=given).json()
    if made["stop_reason"] == "end_turn":
        value(made["content"][0]["text"])
    for output, text in (({"format": {"type": "xml"}}, "output_config.format"), ({"effort": "low"}, "effort")):
        refused = server.http.post("/v1/messages", json={**given, "output_config": output})
        assert refused.status_code == 400 and text in refused.json()["error"]["message"]


def check(server: HttpServer, count: int, draw: random.Random) -> None:
    """Requests with random grammars: refused as 400 or right, in bounded time, and the engine is the same one."""
    engine, served = server.engine_process(), 0
    for _ in range(count):
        given = grammar_fields(draw)
        begin = time.monotonic()
        answer = server.http.post(
            "/v1/completions",
            json={"prompt": "a", "max_tokens": 60, "seed": draw.randrange(9), "structured_outputs": given},
            timeout=120,
        )
        assert time.monotonic() - begin < 30, again(given)
        assert answer.status_code in (200, 400), (again(given), answer.text)
        if answer.status_code == 400:
            assert answer.json()["error"]["message"], again(given)
            continue
        (choice,) = answer.json()["choices"]
        served += 1
        if choice["finish_reason"] != "stop":
            continue
        if "json" in given:
            json.loads(choice["text"])
        if "choice" in given:
            assert choice["text"] in given["choice"], again(given)
    assert served > count / 4 and server.engine_process() == engine
    server.until_idle()
    assert "Traceback" not in server.log.read_text()


def test_random_grammars(server: HttpServer) -> None:
    check(server, 20, random.Random(run_seed()))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_many_random_grammars(server: HttpServer, part: int) -> None:
    check(server, 500, random.Random(f"{run_seed()} {part}"))


def test_a_slow_grammar_delays_no_step(monkeypatch: pytest.MonkeyPatch, chat_artifact: Path) -> None:
    """While a grammar is compiled, other requests are served; an aborted request of it is forgotten.

    The counts after a refusal are sent, although no step follows.
    """
    real = LLM(chat_artifact)
    compiling, go_on = threading.Event(), threading.Event()
    compiled = Grammars._compile

    def slow(self: Grammars, params: Any) -> Any:
        compiling.set()
        assert go_on.wait(30)
        return compiled(self, params)

    monkeypatch.setattr(Grammars, "_compile", slow)
    monkeypatch.setattr(process, "LLM", lambda *_, **__: real)
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=process.serve_connection, args=(theirs,))
    thread.start()
    frames, found = Frames(), []

    def until(wanted: Any) -> None:
        while not wanted():
            found.extend(SERVER_DECODER.decode(one) for one in frames.split(ours.recv(1 << 16)))

    def ended(key: int) -> bool:
        deltas = [delta for one in found if isinstance(one, Step) for delta in one.deltas if delta.key == key]
        return any(delta.finish_reason for delta in deltas)

    ours.settimeout(30)
    choice = {"structured_outputs": {"choice": ["yes"]}, "max_tokens": 8}
    bad = {"structured_outputs": {"json": {"not": {}}}}
    asked = Start("a", {}), Add(1, [3], choice, True, 0, None), Add(2, [3], choice, True, 0, None)
    ours.sendall(b"".join(map(frame, (*asked, Add(3, [3], bad, True, 0, None)))))
    assert compiling.wait(30)
    ours.sendall(frame(Add(4, [4], {"max_tokens": 5, "ignore_eos": True}, True, 0, None)) + frame(Abort(2)))
    until(lambda: ended(4))
    assert not ended(1) and not any(isinstance(one, Refused) for one in found)
    go_on.set()
    until(lambda: ended(1) and any(isinstance(one, Refused) for one in found))
    text = "".join(delta.text for one in found if isinstance(one, Step) for delta in one.deltas if delta.key == 1)
    (refused,) = [one for one in found if isinstance(one, Refused)]
    assert text == "yes" and refused.key == 3 and '"not"' in refused.error["what"] and not ended(2)

    def waiting() -> int:
        return [one.stats.waiting for one in found if isinstance(one, Step)][-1]

    go_on.clear()
    bad = {"structured_outputs": {"json": {"not": {"type": "string"}}}}
    ours.sendall(frame(Add(5, [3], bad, True, 0, None)) + frame(Add(6, [4], {"max_tokens": 2}, True, 0, None)))
    until(lambda: ended(6) and waiting() == 1)
    go_on.set()
    until(lambda: any(isinstance(one, Refused) and one.key == 5 for one in found))
    until(lambda: waiting() == 0)
    ours.close()
    thread.join(30)
    theirs.close()
    assert not thread.is_alive()
