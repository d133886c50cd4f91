"""From conversations to token ids: transformers' own where messages are harmless."""

import json
from collections.abc import Callable

import pytest
from chat_models import CHAT_MODELS
from chat_pair import CLOSED, OPEN, WEATHER, Both, turns

from ingot.runtime.chat.template import ChatOptions


@pytest.mark.parametrize("name", CHAT_MODELS)
@pytest.mark.parametrize(
    "options", [ChatOptions(), CLOSED, ChatOptions(variables={"enable_thinking": False})], ids=["new", "closed", "more"]
)
def test_the_ids_are_those_of_transformers(both: Callable[..., Both], name: str, options: ChatOptions) -> None:
    for messages in (
        turns("Hi"),
        turns("  a  b ", "c\n\n", "\td", system="Be é 你好 🙂"),
        turns("", " ", "\n", system=""),
        turns("im_start im_end| <|im_ end", "[inst] < s >", "end_of_turn>"),
    ):
        both(name).check_equal(messages, options)


@pytest.mark.parametrize("name", CHAT_MODELS)
def test_a_continued_message_is_left_open(both: Callable[..., Both], name: str) -> None:
    for last in ("Sure", "Sure, \n", "  a b", "<ingot:continue> "):
        both(name).check_equal(turns("Hi", last), OPEN)
    assert both(name).prompt(turns("Hi", "Sure"), OPEN).text.endswith("Sure")


def test_tools_and_calls_reach_the_template(both: Callable[..., Both]) -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": 'Bern "é"\n\\'}}}
    for name in ("llama3", "qwen3"):
        messages = [
            *turns("How is it?"),
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "rain", "tool_call_id": "a1"},
        ]
        if name == "llama3":
            messages[1]["content"] = ""
        both(name).check_equal(messages, ChatOptions(tools=[WEATHER]))
        written = both(name).prompt(messages, ChatOptions(tools=[WEATHER]))
        as_text = {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        messages[1] = {**messages[1], "tool_calls": [as_text]}
        assert both(name).prompt(messages, ChatOptions(tools=[WEATHER])) == written


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_has_one_name(both: Callable[..., Both], field: str) -> None:
    messages = [*turns("a?"), {"role": "assistant", "content": "b", field: "because\n"}]
    both("qwen3").check_equal(messages)
    assert "because" in both("qwen3").prompt(messages).text


def test_marks_of_reasoning_in_history_are_the_models_own(both: Callable[..., Both]) -> None:
    messages = turns("a?", "<think>\nbecause\n</think>\n\nb", "c?", "<think>\nso\n</think>\n\nd")
    both("qwen3").check_equal(messages)
    ids = both("qwen3").ids(messages)
    assert both("qwen3").controls(ids).count("<think>") == 1
    messages[0]["content"] = "a<|im_end|>?"  # and they do not stand in the way of telling messages apart
    assert len(both("qwen3").ids(messages)) > len(ids)


def test_parts_of_text_are_joined(both: Callable[..., Both]) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert both("chatml").prompt([{"role": "user", "content": parts}]) == both("chatml").prompt(turns("a\nb"))


def test_a_list_of_conversations(both: Callable[..., Both]) -> None:
    one, two = turns("a"), turns("b", "c", "d")
    chat = both("chatml").chat
    assert chat.prompts([one, two], CLOSED) == [*chat.prompts(one, CLOSED), *chat.prompts(two, CLOSED)]
