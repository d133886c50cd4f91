"""Tools and reasoning in chats: the requests that are refused, and answers to scripted text of a model."""

from __future__ import annotations

import json
from typing import Any

import pytest
from scripted_chat import CALL, HI, TEXT, MakeChat

from ingot.ir.errors import OptionError
from ingot.serve.http.app import make_app
from ingot.serve.http.options import HttpOptions

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}


def test_an_answer_with_calls(chat: MakeChat) -> None:
    """The template shows the formats: calls of Hermes, reasoning of Qwen."""
    model = chat()
    (choice,) = model.post(tools=[TOOL]).json()["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["content"] == "I look." and message["reasoning"] == message["reasoning_content"] == "Hm."
    first, second = message["tool_calls"]
    assert first["type"] == "function" and first["id"].startswith("call_") and first["id"] != second["id"]
    assert first["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
    assert '"weather"' in model.seen[0].prompt.text


def test_a_stream_with_calls(chat: MakeChat) -> None:
    deltas = [chunk["choices"][0]["delta"] for chunk in chat().chunks(tools=[TOOL])]
    assert "".join(delta.get("content") or "" for delta in deltas) == "I look."
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "Hm."
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    begins = [call for call in calls if "id" in call]
    assert [(call["index"], call["type"], call["function"]["name"]) for call in begins] == [
        (0, "function", "weather"),
        (1, "function", "weather"),
    ]
    for index in (0, 1):
        arguments = "".join(call["function"].get("arguments", "") for call in calls if call["index"] == index)
        assert json.loads(arguments) == {"city": "Oslo"}


def test_what_the_client_does_not_want(chat: MakeChat) -> None:
    model = chat()
    (choice,) = model.post(tools=[TOOL], parallel_tool_calls=False, include_reasoning=False).json()["choices"]
    assert len(choice["message"]["tool_calls"]) == 1 and "reasoning" not in choice["message"]
    (choice,) = model.post(tools=[TOOL], tool_choice="none").json()["choices"]
    assert choice["finish_reason"] == "stop" and "tool_calls" not in choice["message"]
    assert CALL in choice["message"]["content"] and "weather" not in model.seen[-1].prompt.text


def test_parsers_that_options_name(chat: MakeChat) -> None:
    plain = chat(tool_call_parser="none", reasoning_parser="none")
    assert plain.post().json()["choices"][0]["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
    other = chat(tool_call_parser="mistral", reasoning_parser="none")
    other.text = '[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}'
    (call,) = other.post(tools=[TOOL]).json()["choices"][0]["message"]["tool_calls"]
    assert len(call["id"]) == 9 and call["id"].isalnum()
    with pytest.raises(OptionError, match="herms") as caught:
        chat(tool_call_parser="herms")
    assert "hermes" in caught.value.hint
    with pytest.raises(OptionError, match="fit together"):
        chat(tool_call_parser="openai", reasoning_parser="qwen3")


def test_special_tokens_of_a_format_are_kept(chat: MakeChat) -> None:
    """Detokenizing leaves special tokens out, unless a format has them. <end> is the tiny model's only one."""
    model = chat()
    model.post(tools=[TOOL])
    assert model.seen[-1].params.skip_special_tokens
    tokenizer = model.llm.model.tokenizer
    assert tokenizer is not None
    tokenizer.added_tokens = {**tokenizer.added_tokens, 7: "<tool_call>"}
    tokenizer.special_ids |= {7}
    serving = make_app(model.llm, HttpOptions(model_names=("tiny",)))[1]
    assert serving.chat_form.needs_special


def test_a_call_that_is_cut_off(chat: MakeChat) -> None:
    model = chat()
    model.text, model.reason = TEXT[:-40], "length"
    (choice,) = model.post(tools=[TOOL]).json()["choices"]
    assert choice["finish_reason"] == "length" and len(choice["message"]["tool_calls"]) >= 1


def test_a_conversation_with_calls(chat: MakeChat) -> None:
    """The template gets arguments as an object."""
    model = chat()
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages = [*HI, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "1", "content": "3"}]
    assert model.post(messages=messages, tools=[TOOL]).status_code == 200
    assert "('city', 'Oslo')" in model.seen[-1].prompt.text and "tool: 3" in model.seen[-1].prompt.text


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "function"}]}, "tools[0]"),
    ({"tools": [{"type": "web", "function": {"name": "f"}}]}, "tools[0]"),
    ({"tools": [3]}, "tools[0]"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]}, "parameters.type"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "parameters"),
    ({"functions": [{"name": "f"}]}, "functions"),
]


@pytest.mark.parametrize(("fields", "where"), BAD)
def test_bad_tools(chat: MakeChat, fields: dict[str, Any], where: str) -> None:
    answer = chat().post(**fields)
    assert answer.status_code == 400 and where in answer.json()["error"]["param"], answer.text


def test_models_that_cannot_call(chat: MakeChat) -> None:
    """Without tools in the template, the model would not see them; without a known format, calls would not be found."""
    for template, text in ((None, "template"), ("{{ tools }}{{ messages[0].content }}", "--tool-call-parser")):
        answer = chat(template).post(tools=[TOOL])
        assert answer.status_code == 400 and text in answer.json()["error"]["message"], answer.text
