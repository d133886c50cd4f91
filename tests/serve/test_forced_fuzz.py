"""Random tools and choices of tools on a tiny model: a request is refused as 400, or its calls are valid."""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from random_grammars import function_schema
from random_messages import random_name
from run_seed import again, run_seed
from scripted_chat import TOOLS_TEMPLATE
from thread_server import EngineThread, ThreadServer, thread_server

pytestmark = [pytest.mark.xdist_group("serve"), pytest.mark.one_in_file(3)]
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
JUNK: tuple[Any, ...] = ("required", "any", "", 0, 3, [], {}, {"type": "any"}, {"type": "function"}, {"type": "tool"})


def random_tools(draw: random.Random, path: str) -> dict[str, Any]:
    """The schemas of a request's tools, by name. A tool of messages has a schema."""
    tools: dict[str, Any] = {}
    for _ in range(draw.choice((0, 1, 1, 2, 4))):
        given = path == MESSAGES or draw.random() < 0.8
        tools[draw.choice((random_name(draw), "f", "f.a", "f/b"))] = function_schema(draw) if given else None
    return tools


def request(draw: random.Random, path: str, tools: dict[str, Any]) -> dict[str, Any]:
    name = draw.choice([*tools, "other"])
    body: dict[str, Any] = {"seed": draw.randrange(9), "stream": draw.random() < 0.3}
    one_call = draw.random() < 0.7
    if path == MESSAGES:
        body |= {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 150}
        body["tools"] = [{"name": one, "input_schema": schema} for one, schema in tools.items()]
        kinds = ({"type": "any"}, {"type": "tool", "name": name})
        body["tool_choice"] = {**draw.choice(kinds), "disable_parallel_tool_use": one_call}
        return body
    functions = [{"name": one, **({} if schema is None else {"parameters": schema})} for one, schema in tools.items()]
    body["parallel_tool_calls"] = not one_call
    if path == RESPONSES:
        body |= {"input": "hi", "max_output_tokens": 150, "tools": [{"type": "function", **one} for one in functions]}
        named: dict[str, Any] = {"type": "function", "name": name}
    else:
        body |= {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 150}
        body["tools"] = [{"type": "function", "function": one} for one in functions]
        named = {"type": "function", "function": {"name": name}}
    body["tool_choice"] = draw.choice(("required", named, named, "auto"))
    if draw.random() < 0.2:
        body["response_format" if path == CHAT else "text"] = {"type": "json_object"}
    return body


def ended_calls(path: str, answer: dict[str, Any]) -> list[tuple[str, Any]]:
    """The calls of a whole answer that no limit has cut off."""
    if path == CHAT:
        (choice,) = answer["choices"]
        functions = [call["function"] for call in choice["message"].get("tool_calls", ())]
        found = [(one["name"], one["arguments"]) for one in functions]
        return [] if choice["finish_reason"] == "length" else [(one, json.loads(text)) for one, text in found]
    if path == RESPONSES:
        items = [item for item in answer["output"] if item["type"] == "function_call"]
        done = answer["status"] == "completed"
        return [(item["name"], json.loads(item["arguments"])) for item in items] if done else []
    blocks = [block for block in answer["content"] if block["type"] == "tool_use"]
    return [(one["name"], one["input"]) for one in blocks] if answer["stop_reason"] == "tool_use" else []


def check(server: ThreadServer, count: int, draw: random.Random) -> None:
    served = called = 0
    for _ in range(count):
        path = draw.choice((CHAT, RESPONSES, MESSAGES))
        tools = random_tools(draw, path)
        body = request(draw, path, tools)
        if draw.random() < 0.1:
            body["tool_choice"] = draw.choice(JUNK)
        answer = server.http.post(path, json=body, timeout=120)
        assert answer.status_code in (200, 400), (again(body), path, answer.text)
        if answer.status_code == 400:
            assert answer.json()["error"]["message"], again(body)
            continue
        served += 1
        if body["stream"]:
            assert '"server_error"' not in answer.text and '"api_error"' not in answer.text, again(body)
            continue
        for name, arguments in ended_calls(path, answer.json()):
            called += 1
            assert name in tools, again(body)
            if body["tool_choice"] == "auto":  # a call in place of an answer with a format: any object
                assert isinstance(arguments, dict), again(body)
            elif tools[name] is None:
                assert arguments == {}, again(body)
            else:
                # jsonschema calls itself for each reference of a chain, and chains have up to 5000.
                with contextlib.suppress(RecursionError):
                    Draft202012Validator(tools[name]).validate(arguments)
    # Of a few requests, most may be refused.
    assert served > (count / 6 if count >= 50 else 0) and (called or count < 50)
    server.until_idle()


def test_random_choices(tools_server: ThreadServer) -> None:
    check(tools_server, 12, random.Random(run_seed()))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_many_random_choices(tools_server: ThreadServer, part: int) -> None:
    check(tools_server, 100, random.Random(f"{run_seed()} {part}"))


@pytest.mark.slow
def test_many_random_choices_in_tags(engine_thread: type[EngineThread], chat_artifact: Path, tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text(TOOLS_TEMPLATE)
    with thread_server(chat_artifact, tmp_path, chat_template=template, tool_call_parser="qwen3_coder") as server:
        check(server, 100, random.Random(f"{run_seed()} tags"))
