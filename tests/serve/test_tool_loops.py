"""Loops of tools on a tiny model: it must call a tool, gets the result, and answers. The clients are unchanged ones.

LangChain's and Anthropic's are skipped where they are not installed: pip install langchain-openai anthropic.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from openai import BadRequestError, OpenAI
from thread_server import ThreadServer

pytestmark = [pytest.mark.xdist_group("serve"), pytest.mark.one_in_file(3)]

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
}
FUNCTION = {"name": "weather", "description": "d", "parameters": SCHEMA}
CHAT_TOOLS: Any = [{"type": "function", "function": FUNCTION}, {"type": "function", "function": {"name": "time"}}]
FLAT_TOOLS: Any = [{"type": "function", **FUNCTION}, {"type": "function", "name": "time"}]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
HI: Any = {"role": "user", "content": "hi"}
MOST = 1500


@pytest.fixture(scope="module")
def client(tools_server: ThreadServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{tools_server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def check(name: str, arguments: str) -> None:
    found = json.loads(arguments)
    if name == "time":
        assert found == {}
    else:
        assert name == "weather"
        Draft202012Validator({**SCHEMA, "additionalProperties": False}).validate(found)


@pytest.mark.parametrize("seed", range(3))
def test_chats(client: OpenAI, seed: int) -> None:
    common: Any = {"model": "tiny", "tools": CHAT_TOOLS, "max_tokens": MOST, "seed": seed}
    made = client.chat.completions.create(
        messages=[HI], tool_choice="required", parallel_tool_calls=bool(seed), **common
    )
    (choice,) = made.choices
    assert choice.message.tool_calls and choice.finish_reason in ("tool_calls", "length")
    if choice.finish_reason == "length":  # a random model may call and call
        return
    assert seed or len(choice.message.tool_calls) == 1
    results: list[Any] = []
    for call in choice.message.tool_calls:
        assert call.type == "function"
        check(call.function.name, call.function.arguments)
        results.append({"role": "tool", "tool_call_id": call.id, "content": "rain"})
    messages: Any = [HI, choice.message.to_dict(), *results]
    common["max_tokens"] = 8
    last = client.chat.completions.create(messages=messages, tool_choice="none", **common).choices[0]
    assert last.message.tool_calls is None and last.message.content


def test_streamed_chats(client: OpenAI) -> None:
    with client.chat.completions.stream(
        model="tiny", messages=[HI], tools=CHAT_TOOLS, tool_choice=NAMED, max_tokens=MOST, seed=5
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    (choice,) = final.choices
    (call,) = choice.message.tool_calls or ()
    assert choice.finish_reason == "stop" and not choice.message.content
    check(call.function.name, call.function.arguments)
    assert call.function.name == "weather" and kinds.count("tool_calls.function.arguments.delta") > 3


@pytest.mark.parametrize("streams", [False, True])
def test_responses(client: OpenAI, streams: bool) -> None:
    common: Any = {"model": "tiny", "tools": FLAT_TOOLS, "max_output_tokens": MOST}
    first: Any = {"input": "hi", "tool_choice": "required", "parallel_tool_calls": False, **common}
    if streams:
        events = list(client.responses.create(stream=True, **first))
        assert any(event.type == "response.function_call_arguments.delta" for event in events)
        made = events[-1].response
    else:
        made = client.responses.create(**first)
    (call,) = made.output
    assert call.type == "function_call" and made.status == "completed"
    check(call.name, call.arguments)
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    common["max_output_tokens"] = 8
    last = client.responses.create(input=[result], previous_response_id=made.id, tool_choice="none", **common)
    assert last.output_text and all(item.type == "message" for item in last.output)


def test_a_format_of_the_answer_beside_tools(client: OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    made = client.chat.completions.create(
        model="tiny", messages=[HI], tools=CHAT_TOOLS, response_format=form, max_tokens=300, n=4, seed=1
    )
    for choice in made.choices:
        calls = choice.message.tool_calls or ()
        assert bool(calls) != bool(choice.message.content)
        for call in () if choice.finish_reason == "length" else calls:
            assert call.type == "function" and call.function.name in ("weather", "time")
        if choice.message.content and choice.finish_reason == "stop":
            Draft202012Validator(SCHEMA).validate(json.loads(choice.message.content))


def test_schemas_that_are_refused(client: OpenAI) -> None:
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "not": {}}}}]
    for stream in (False, True):
        with pytest.raises(BadRequestError) as caught:
            client.chat.completions.create(
                model="tiny", messages=[HI], tools=tools, tool_choice="required", max_tokens=9, stream=stream
            )
        error: Any = caught.value.body
        assert error["param"] == "tools" and '"not"' in error["message"] and '"auto"' in error["message"]
    assert client.chat.completions.create(model="tiny", messages=[HI], tools=tools, max_tokens=3).choices


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["any", "weather"])
def test_langchain(tools_server: ThreadServer, choice: str) -> None:
    pytest.importorskip("langchain_openai")
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    @tool
    def weather(hot: bool) -> str:
        """Return the weather."""
        return f"rain {hot}"

    chat = ChatOpenAI(model="tiny", base_url=f"{tools_server.url}/v1", api_key="none", max_tokens=MOST, seed=3)
    bound = chat.bind_tools([weather], tool_choice=choice, parallel_tool_calls=False)
    messages: list[Any] = [HumanMessage("hi")]
    answer = bound.invoke(messages)
    (call,) = answer.tool_calls
    assert call["name"] == "weather" and isinstance(call["args"]["hot"], bool)
    messages += [answer, ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])]
    assert chat.bind(max_tokens=8).invoke(messages).content
    whole: Any = None
    for chunk in bound.stream("hi"):
        whole = chunk if whole is None else whole + chunk
    assert [one["name"] for one in whole.tool_calls] == ["weather"]


@pytest.mark.slow
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_anthropic(tools_server: ThreadServer, choice: Any) -> None:
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=tools_server.url, api_key="none", max_retries=0)
    tools = [{"name": "weather", "input_schema": SCHEMA}]
    common: Any = {"model": "tiny", "max_tokens": MOST, "tools": tools}
    choice = {**choice, "disable_parallel_tool_use": True}
    made = client.messages.create(messages=[HI], tool_choice=choice, **common)
    (use,) = made.content
    assert made.stop_reason == "tool_use" and (use.type, use.name) == ("tool_use", "weather")
    Draft202012Validator(SCHEMA).validate(use.input)
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "rain"}
    messages = [HI, {"role": "assistant", "content": made.content}, {"role": "user", "content": [result]}]
    last = client.messages.create(messages=messages, tool_choice={"type": "none"}, **{**common, "max_tokens": 8})
    assert last.content[0].type == "text"
    with client.messages.stream(messages=[HI], tool_choice=choice, **common) as stream:
        assert stream.get_final_message().content[0].type == "tool_use"
