"""Which parsers a model has: by its chat template, by name, from another package; and where reasoning begins."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

import pytest

from ingot.ir import plugins
from ingot.ir.errors import OptionError
from ingot.serve.parsers.choice import (
    ParserNames,
    chosen_parsers,
    reasoning_choice_of,
    reasoning_parser_names,
    tool_choice_of,
    tool_parser_names,
)
from ingot.serve.parsers.events import CallBegun, CallEnded, Content, Event, Reasoning
from ingot.serve.parsers.output_parser import OutputFormat
from ingot.serve.parsers.reasoning import ReasoningForm
from ingot.serve.parsers.source import Markers
from ingot.serve.parsers.tool_use import ToolUse

TEMPLATES = [
    ("<tool_call>\n{{ call | tojson }}\n</tool_call>", "hermes", None),
    ("<think>\n\n</think>\n\n<tool_call>", "hermes", "qwen3"),
    ("<tool_call>\n<function=x>\n<parameter=y>", "qwen3_coder", None),
    ("<seed:tool_call><function=x><parameter=y> <seed:think>", "seed_oss", "seed_oss"),
    ("[TOOL_CALLS] [THINK]", "mistral", "mistral"),
    ("<|python_tag|>", "llama3_json", None),
    ("<|channel|>analysis<|message|>", "openai", "openai_gptoss"),
    ("<｜tool▁calls▁begin｜> ```json </think>", "deepseek_v3", "qwen3"),
    ("<tool_call>{{ name }}\n<arg_key> <think></think>", "glm45", "qwen3"),
    ("<｜DSML｜function_calls>", "deepseek_v32", None),
    ("<｜DSML｜tool_calls>", "deepseek_v4", None),
    ("{{ messages }}", None, None),
    ("", None, None),
]


@pytest.mark.parametrize(("template", "tools", "reasoning"), TEMPLATES)
def test_the_template_shows_the_formats(template: str, tools: str | None, reasoning: str | None) -> None:
    assert chosen_parsers("auto", "auto", template) == ParserNames(tools, reasoning)
    assert chosen_parsers("none", "none", template) == ParserNames(None, None)
    assert chosen_parsers("xlam", "step3", template) == ParserNames("xlam", "step3")


def test_all_names_have_a_format() -> None:
    assert all(tool_choice_of(name) for name in tool_parser_names())
    assert all(reasoning_choice_of(name) for name in reasoning_parser_names())
    assert tool_choice_of("phi4_mini_json") is tool_choice_of("phi4mini_json")


def test_unknown_names() -> None:
    with pytest.raises(OptionError, match="qwen3_code") as caught:
        chosen_parsers("qwen3_code", "auto", "")
    assert "qwen3_coder" in caught.value.hint and "hermes" in caught.value.expected
    with pytest.raises(OptionError, match="--reasoning-parser"):
        chosen_parsers("auto", "deepseek", "")


class Shouting:
    """A parser of another package: text in capitals is a call of the function with this name."""

    def __init__(self, tools: Any) -> None:
        self._tools = tools

    def feed(self, text: str) -> list[Event]:
        return [CallBegun(0, text.lower()), CallEnded(0)] if text.lower() in self._tools else [Content(text)]

    def finish(self) -> list[Event]:
        return []


def test_a_parser_of_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("shouting", f"{__name__}:Shouting", plugins.TOOL_PARSERS_GROUP)

    def entry_points(group: str, name: str | None = None) -> list[EntryPoint]:
        return [entry] if group == entry.group and name in (None, entry.name) else []

    monkeypatch.setattr(plugins, "entry_points", entry_points)
    monkeypatch.setattr(plugins, "_load", lambda _entry: Shouting)
    assert chosen_parsers("shouting", "auto", "") == ParserNames("shouting", None)
    parser = OutputFormat(tool_choice_of("shouting"), reasoning_choice_of("qwen3")).parser(
        ToolUse({"time": {}}), "<think>"
    )
    assert parser is not None
    assert parser.feed("hm</think>TIME") == [Reasoning("hm"), CallBegun(0, "time"), CallEnded(0)]
    monkeypatch.setattr(plugins, "_load", lambda _entry: 3)
    with pytest.raises(OptionError, match="no parser"):
        tool_choice_of("shouting")


@pytest.mark.parametrize(
    ("name", "prompt", "continues", "begun"),
    [
        ("qwen3", "assistant\n", False, False),
        ("qwen3", "assistant\n<think>\n", False, True),
        ("qwen3", "assistant\n<think>\n\n</think>\n\n", False, False),
        ("deepseek_r1", "assistant", False, True),
        ("deepseek_r1", "assistant<think></think>", False, False),
        ("deepseek_r1", "assistant<think>a</think>b", True, False),
        ("deepseek_r1", "assistant<think>a", True, True),
        ("deepseek_r1", "assistant: b", True, False),
    ],
)
def test_where_a_message_begins(name: str, prompt: str, *, continues: bool, begun: bool) -> None:
    form = reasoning_choice_of(name)
    assert isinstance(form, ReasoningForm) and form.begun_by(prompt, continues=continues) is begun


def test_markers_must_not_contain_each_other() -> None:
    assert Markers(("<a>", ">")).find("x<a>", 0) == (1, "<a>")
    for texts in (("<a>", "a"), ("",)):
        with pytest.raises(ValueError, match="markers"):
            Markers(texts)
