"""Requests that force calls of tools, in all routes: their grammars, their answers, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from scripted_chat import CALL, MakeChat

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("weather", "time")]
FLAT = [{"type": "function", "name": name, "parameters": SCHEMA} for name in ("weather", "time")]
ANTHROPIC = [{"name": name, "input_schema": SCHEMA} for name in ("weather", "time")]
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
NAMED = {"type": "function", "function": {"name": "weather"}}
FORCED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"tools": TOOLS, "tool_choice": "required"}),
    (CHAT, {"tools": TOOLS, "tool_choice": NAMED}),
    (RESPONSES, {"tools": FLAT, "tool_choice": "required"}),
    (RESPONSES, {"tools": FLAT, "tool_choice": {"type": "function", "name": "weather"}}),
    (MESSAGES, {"tools": ANTHROPIC, "tool_choice": {"type": "any"}}),
    (MESSAGES, {"tools": ANTHROPIC, "tool_choice": {"type": "tool", "name": "weather"}}),
]
FORMAT = {"type": "json_schema", "name": "a", "schema": SCHEMA}
FORMATS = {
    CHAT: {"response_format": {"type": "json_schema", "json_schema": FORMAT}},
    RESPONSES: {"text": {"format": FORMAT}},
    MESSAGES: {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
}


def is_named(fields: dict[str, Any]) -> bool:
    choice = fields["tool_choice"]
    return isinstance(choice, dict) and choice["type"] != "any"


@pytest.mark.parametrize(("path", "fields"), FORCED)
def test_the_grammar(chat: MakeChat, path: str, fields: dict[str, Any]) -> None:
    """It has the call's texts in the model's form, for the tools that the request allows. All tools are in the prompt.
    A format of the answer has no effect: there is only the call."""
    model = chat()
    model.text = f"<think>\nHm.\n</think>\n\n{CALL}"
    assert model.post(path, **fields, **FORMATS[path]).status_code == 200
    grammar = model.seen[-1].params.structured_outputs.structural_tag
    assert "</think>" in grammar and r"<tool_call>\n{\"name\": \"weather\"" in grammar
    assert ("time" in grammar) != is_named(fields) and ('"stop_after_first":true' in grammar) == is_named(fields)
    assert '"time"' in model.seen[-1].prompt.text


@pytest.mark.parametrize(("path", "fields"), FORCED)
def test_one_call(chat: MakeChat, path: str, fields: dict[str, Any]) -> None:
    model = chat()
    choice = fields["tool_choice"]
    if path == MESSAGES:
        fields = {**fields, "tool_choice": {**choice, "disable_parallel_tool_use": True}}
    else:
        fields = {**fields, "parallel_tool_calls": False}
    assert model.post(path, **fields).status_code == 200
    assert '"stop_after_first":true' in model.seen[-1].params.structured_outputs.structural_tag


def test_why_a_chat_ends(chat: MakeChat) -> None:
    """As OpenAI's: the call of a named function ends with "stop", others with "tool_calls"."""
    model = chat()
    model.text = CALL
    for choice, reason in (("required", "tool_calls"), (NAMED, "stop"), ("auto", "tool_calls")):
        (whole,) = model.post(tools=TOOLS, tool_choice=choice).json()["choices"]
        chunks = model.chunks(tools=TOOLS, tool_choice=choice)
        assert whole["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"] == reason
        assert (
            whole["message"]["content"] is None and whole["message"]["tool_calls"][0]["function"]["name"] == "weather"
        )
    model.reason = "length"
    assert model.post(tools=TOOLS, tool_choice=NAMED).json()["choices"][0]["finish_reason"] == "length"


def test_what_other_routes_answer(chat: MakeChat) -> None:
    model = chat()
    model.text = CALL
    message = model.post(MESSAGES, **FORCED[5][1]).json()
    assert (message["stop_reason"], message["content"][0]["type"]) == ("tool_use", "tool_use")
    response = model.post(RESPONSES, **FORCED[3][1]).json()
    assert response["tool_choice"] == FORCED[3][1]["tool_choice"] and response["status"] == "completed"
    assert [item["type"] for item in response["output"]] == ["function_call"]


@pytest.mark.parametrize("parser", ["none", "pythonic", "gemma4"])
def test_calls_without_a_form_in_json(chat: MakeChat, parser: str) -> None:
    """They come as a list in JSON, also where the server does not know the form of the model's calls."""
    model = chat(tool_call_parser=parser, reasoning_parser="none")
    model.text = '[{"name": "weather", "arguments": {"city": "Oslo"}}, {"name": "time", "arguments": {}}]'
    for message in (
        model.post(tools=TOOLS, tool_choice="required").json()["choices"][0]["message"],
        _joined(model.chunks(tools=TOOLS, tool_choice="required")),
    ):
        calls = [
            (call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]
        ]
        assert calls == [("weather", {"city": "Oslo"}), ("time", {})] and not message.get("content")


def _joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    calls: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        delta = chunk["choices"][0]["delta"]
        assert not delta.get("content")
        for call in delta.get("tool_calls", ()):
            function = calls.setdefault(call["index"], {"function": {"name": "", "arguments": ""}})["function"]
            function["name"] += call["function"].get("name", "")
            function["arguments"] += call["function"]["arguments"]
    return {"tool_calls": [calls[index] for index in sorted(calls)]}


@pytest.mark.parametrize("path", FORMATS)
def test_a_format_of_the_answer(chat: MakeChat, path: str) -> None:
    """It begins after the reasoning; with tools, calls may come in its place."""
    model = chat()
    tools = {CHAT: TOOLS, RESPONSES: FLAT, MESSAGES: ANTHROPIC}[path]
    for given in ({}, {"tools": tools}):
        assert model.post(path, **FORMATS[path], **given).status_code == 200
        grammar = model.seen[-1].params.structured_outputs.structural_tag
        assert "</think>" in grammar and ("<tool_call>" in grammar) == bool(given)
    plain = chat(reasoning_parser="none", tool_call_parser="none")
    assert plain.post(path, **FORMATS[path]).status_code == 200
    assert plain.seen[-1].params.structured_outputs.json is not None
    assert chat().post(path).status_code == 200 and chat().post(path, tools=tools).status_code == 200


def test_all_grammars_of_an_answer(chat: MakeChat) -> None:
    model = chat()
    older = {"structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}], "triggers": ["<a"]}
    for given, text in (
        ({"regex": "[ab]+"}, "[ab]+"),
        ({"choice": ["one", "two"]}, "two"),
        ({"grammar": 'root ::= "x"'}, "root"),
        ({"json_object": True}, '"type":"object"'),
        ({"structural_tag": {"format": {"type": "any_text"}}}, "any_text"),
        ({"structural_tag": older}, "triggered_tags"),
    ):
        answer = model.post(structured_outputs={**given, "disable_any_whitespace": True})
        made = model.seen[-1].params.structured_outputs
        assert answer.status_code == 200 and text in made.structural_tag and made.disable_any_whitespace
    assert model.post(structured_outputs={"regex": 3}).status_code == 400
    assert model.post(response_format={"type": "json_object"}, structured_outputs={"regex": "a"}).status_code == 400


BAD: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"tool_choice": "required"}, "send tools"),
    (CHAT, {"tools": [], "tool_choice": NAMED}, "send tools"),
    (CHAT, {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "weather, time"),
    (CHAT, {"tools": TOOLS, "tool_choice": {"type": "function", "function": {}}}, "weather, time"),
    (CHAT, {"tools": TOOLS, "tool_choice": {"type": "function"}}, "weather, time"),
    (CHAT, {"tools": TOOLS, "tool_choice": {"type": "custom"}}, '"required"'),
    (CHAT, {"tools": TOOLS, "tool_choice": "required", "structured_outputs": {"regex": "a"}}, "send one of them"),
    (RESPONSES, {"tool_choice": "required"}, "send tools"),
    (RESPONSES, {"tools": FLAT, "tool_choice": {"type": "function", "name": "other"}}, "weather, time"),
    (MESSAGES, {"tool_choice": {"type": "any"}}, "send tools"),
    (MESSAGES, {"tools": ANTHROPIC, "tool_choice": {"type": "tool"}}, "weather, time"),
    (MESSAGES, {"tools": ANTHROPIC, "tool_choice": {"type": "required"}}, '"any"'),
    (MESSAGES, {"tools": ANTHROPIC, "tool_choice": {"type": [3]}}, '"any"'),
]


@pytest.mark.parametrize(("path", "fields", "text"), BAD)
def test_what_is_refused(chat: MakeChat, path: str, fields: dict[str, Any], text: str) -> None:
    answer = chat().post(path, **fields)
    error = answer.json()["error"]
    assert answer.status_code == 400 and text in error["message"], answer.text
    assert "tool_choice" in (error.get("param") or error["message"])


def test_a_schema_that_is_too_long(chat: MakeChat) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["x" * 300_000]}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    error = chat().post(tools=tools, tool_choice="required", truncate_prompt_tokens=9).json()["error"]
    assert error["param"] == "tools" and 'tool_choice "auto"' in error["message"]
