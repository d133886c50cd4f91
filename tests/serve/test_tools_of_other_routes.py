"""Tools and reasoning of /v1/messages and /v1/responses, in answers to scripted text of a model."""

from __future__ import annotations

import json
from typing import Any

import pytest
from scripted_chat import MakeChat

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
ANTHROPIC = {"tools": [{"name": "weather", "description": "d", "input_schema": SCHEMA}]}
OPENAI = {"tools": [{"type": "function", "name": "weather", "parameters": SCHEMA}]}
OSLO = {"city": "Oslo"}


def test_a_message_with_calls(chat: MakeChat) -> None:
    answer = chat().post("/v1/messages", **ANTHROPIC).json()
    assert answer["stop_reason"] == "tool_use"
    thinking, text, *calls = answer["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "Hm.")
    assert (text["type"], text["text"]) == ("text", "I look.")
    assert [(call["type"], call["name"], call["input"]) for call in calls] == [("tool_use", "weather", OSLO)] * 2
    assert calls[0]["id"] != calls[1]["id"]
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    assert len(chat().post("/v1/messages", **ANTHROPIC, tool_choice=choice).json()["content"]) == 3


def test_a_stream_of_a_message(chat: MakeChat) -> None:
    """Each block begins, grows and ends before the next one."""
    blocks: list[tuple[str, str]] = []
    open_block = False
    for event in chat().chunks("/v1/messages", **ANTHROPIC):
        if event["type"] == "content_block_start":
            assert not open_block and event["index"] == len(blocks)
            blocks.append((event["content_block"]["type"], ""))
            open_block = True
        elif event["type"] == "content_block_delta":
            assert open_block and event["index"] == len(blocks) - 1
            delta = {name: text for name, text in event["delta"].items() if name != "type"}
            (text,) = delta.values()
            blocks[-1] = (blocks[-1][0], blocks[-1][1] + text)
        elif event["type"] == "content_block_stop":
            open_block = False
        elif event["type"] == "message_delta":
            assert event["delta"]["stop_reason"] == "tool_use"
    assert not open_block and blocks[:2] == [("thinking", "Hm."), ("text", "I look.")]
    assert [(kind, json.loads(text)) for kind, text in blocks[2:]] == [("tool_use", OSLO)] * 2


def test_a_conversation_of_messages(chat: MakeChat) -> None:
    model = chat()
    use = {"type": "tool_use", "id": "1", "name": "weather", "input": OSLO}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "rain"}]}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "x", "signature": ""}, use]},
        {"role": "user", "content": [result, {"type": "text", "text": "and?"}]},
    ]
    assert model.post("/v1/messages", messages=messages, **ANTHROPIC).status_code == 200
    prompt = model.seen[-1].prompt.text
    assert "('city', 'Oslo')" in prompt and prompt.index("tool: rain") < prompt.index("user: and?")


def test_a_response_with_calls(chat: MakeChat) -> None:
    model = chat()
    answer = model.post("/v1/responses", **OPENAI).json()
    reasoning, message, *calls = answer["output"]
    assert reasoning["type"] == "reasoning" and reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert message["content"][0]["text"] == "I look."
    assert [(call["type"], call["name"], json.loads(call["arguments"])) for call in calls] == [
        ("function_call", "weather", OSLO)
    ] * 2
    # The conversation goes on from the store, and from items that the client sends.
    results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "rain"} for call in calls]
    assert model.post("/v1/responses", input=results, previous_response_id=answer["id"], **OPENAI).status_code == 200
    stored = model.seen[-1].prompt.text
    sent = [{"role": "user", "content": "hi"}, *answer["output"], *results]
    assert model.post("/v1/responses", input=sent, **OPENAI).status_code == 200
    assert model.seen[-1].prompt.text == stored and stored.count("tool: rain") == 2


def test_a_stream_of_a_response(chat: MakeChat) -> None:
    """Events tell the same as the last one, which has the whole response."""
    events = chat().chunks("/v1/responses", **OPENAI)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    output = events[-1]["response"]["output"]
    texts: dict[int, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            texts[event["output_index"]] = texts.get(event["output_index"], "") + event["delta"]
    assert [texts[0], texts[1]] == [output[0]["content"][0]["text"], output[1]["content"][0]["text"]]
    assert [texts[2], texts[3]] == [output[2]["arguments"], output[3]["arguments"]]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == output


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("messages", {"tools": [{"name": "f", "type": "web_search_20250305"}]}, "tools[0]"),
    ("messages", {"tools": [{"input_schema": {}}]}, "tools[0].function.name"),
    ("responses", {"tools": [{"type": "web_search"}]}, "tools[0]"),
    ("responses", {"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
    ("responses", {"input": [{"type": "function_call_output", "call_id": "1", "output": 3}]}, "input[0].output"),
]


@pytest.mark.parametrize(("route", "fields", "where"), BAD)
def test_bad_tools(chat: MakeChat, route: str, fields: dict[str, Any], where: str) -> None:
    answer = chat().post(f"/v1/{route}", **fields)
    error = answer.json()["error"]
    assert answer.status_code == 400 and where in (error.get("param") or error["message"]), answer.text
