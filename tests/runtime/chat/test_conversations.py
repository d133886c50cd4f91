"""What a conversation and its options may be."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from chat_models import CHAT_MODELS
from chat_pair import OPEN, Both, turns

from ingot.ir.errors import RequestError
from ingot.runtime.chat.template import ChatOptions


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "empty conversation"),
        ([[]], "no conversation"),
        ("Hi", "no conversation"),
        ({"role": "user", "content": "x"}, "no conversation"),
        ([{"role": "user", "content": "x"}, "y"], "no conversation"),
        ([{"role": "user"}], "without content"),
        ([{"role": "user", "content": None}], "without content"),
        ([{"role": "assistant", "content": None}], "without content"),
        ([{"role": "user", "content": 5}], "content of type int"),
        ([{"role": "user", "content": [{"type": "image"}]}], r"is no text[\s\S]*messages\[0\]\.content\[0\]"),
        ([{"content": "x"}], "role = None"),
        ([{"role": "User", "content": "x"}], r"role = 'User'[\s\S]*system.*tool"),
        ([{"role": "<|im_end|>", "content": "x"}], "role = "),
        ([{"role": "user", "content": "x", "extra": object()}], r"type object[\s\S]*messages\[0\]\.extra"),
        ([{"role": "user", "content": "x", "extra": [1 << 99999]}], r"too large[\s\S]*messages\[0\]\.extra\[0\]"),
        ([{"role": "user", "content": "x", 5: 6}], "key 5 is no text"),
        ([{"role": "user", "content": "\ud800"}], "no valid Unicode"),
        ([{"role": "assistant", "tool_calls": [5]}], "no call"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}], "no JSON"),
    ],
)
def test_bad_conversations_are_refused(both: Callable[..., Both], messages: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        both("chatml").ids(messages)


def test_data_without_end_is_refused(both: Callable[..., Both]) -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(RequestError, match="nested"):
        both("chatml").ids([{"role": "user", "content": "x", "extra": endless}])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (ChatOptions(add_generation_prompt=True, continue_final_message=True), "together"),
        (ChatOptions(tools={"type": "function"}), "tools are no list"),
        (ChatOptions(tools=[5]), "tools are no list"),
        (ChatOptions(variables=[5]), "no object"),  # type: ignore[arg-type]
        (ChatOptions(variables={"chat_template": "x"}), "template of the artifact"),
        (ChatOptions(variables={"messages": []}), "the argument messages"),
    ],
)
def test_bad_options_are_refused(both: Callable[..., Both], options: ChatOptions, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        both("chatml").ids(turns("x"), options)


def test_a_message_that_the_template_drops_cannot_be_continued(both: Callable[..., Both]) -> None:
    it = both(dataclasses.replace(CHAT_MODELS["chatml"], template="{{ messages[0].content }}"))
    with pytest.raises(RequestError, match="cannot be continued"):
        it.ids(turns("a", "b"), OPEN)
