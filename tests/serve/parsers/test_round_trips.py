"""Random messages in each format: the parser returns exactly them, however the text is cut."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from cut_text import cut, parsed
from random_messages import Message, random_message, tools_of
from rendered_messages import REASONING, TOOLS, WITHOUT_CONTENT, rendered
from run_seed import again, run_seed

from ingot.serve.parsers.choice import reasoning_choice_of, tool_choice_of
from ingot.serve.parsers.events import Arguments, CallBegun, CallEnded, Content, Event, Reasoning
from ingot.serve.parsers.output_parser import OutputFormat
from ingot.serve.parsers.reasoning import ReasoningForm
from ingot.serve.parsers.reasoning_formats import REASONING_FORMATS
from ingot.serve.parsers.tool_formats import TOOL_FORMATS
from ingot.serve.parsers.tool_use import ToolUse

pytestmark = pytest.mark.one_in_file(3)

# Formats of the table that are equal to one with a renderer.
SAME = {"mimo": "qwen3_coder", "qwen3_xml": "qwen3_coder", "step3p5": "qwen3_coder"}
MESSAGES = 200


def message_of(events: list[Event]) -> Message:
    """The message that events describe. They must be well-formed."""
    content, reasoning = "", ""
    calls: list[tuple[str, Any]] = []
    begun: CallBegun | None = None
    arguments = ""
    for event in events:
        match event:
            case Content(text):
                content += text
            case Reasoning(text):
                reasoning += text
            case CallBegun(index):
                assert begun is None and index == len(calls)
                begun, arguments = event, ""
            case Arguments(index, text):
                assert begun is not None and index == begun.index
                arguments += text
            case CallEnded(index, complete):
                assert begun is not None and index == begun.index and complete
                calls.append((begun.name, json.loads(arguments)))
                begun = None
    assert begun is None
    return Message(content, reasoning, calls)


def check(draw: random.Random, tools: str | None, reasoning: str | None) -> None:
    message = random_message(draw)
    if tools in WITHOUT_CONTENT and message.calls:
        message = Message("", message.reasoning, message.calls)
    if tools is None:
        message = Message(message.content, message.reasoning)
    if reasoning is None and tools != "openai":
        message = Message(message.content, "", message.calls)
    if tools == "xlam":  # whose marker of calls is that of code
        message = Message(message.content.replace("`", "").strip(), message.reasoning, message.calls)
    chosen = None if reasoning is None else reasoning_choice_of(reasoning)
    form = OutputFormat(None if tools is None else tool_choice_of(tools), chosen)
    functions = tools_of(message) or {"unused": {}}
    prompt = "" if reasoning is None or REASONING[reasoning][0] else "<think>\n"
    begun = isinstance(chosen, ReasoningForm) and chosen.begun_by(prompt, continues=False)
    text = rendered(message, tools, reasoning, begun=begun)
    events = []
    for pieces in ([text], cut(draw, text)):
        parser = form.parser(ToolUse(functions), prompt)
        assert parser is not None
        events.append(parsed(parser, pieces))
    assert events[0] == events[1], (text, again(tools or reasoning))
    assert message_of(events[0]) == message, (text, again(tools or reasoning))


@pytest.mark.parametrize("name", TOOLS)
def test_tools(name: str) -> None:
    draw = random.Random(f"{run_seed()} {name}")
    for _ in range(MESSAGES):
        check(draw, name, None)


@pytest.mark.parametrize("name", REASONING)
def test_reasoning(name: str) -> None:
    draw = random.Random(f"{run_seed()} {name}")
    for _ in range(MESSAGES):
        check(draw, None, name)


@pytest.mark.parametrize("name", REASONING)
def test_reasoning_and_tools(name: str) -> None:
    draw = random.Random(f"{run_seed()} both {name}")
    for _ in range(MESSAGES // 4):
        check(draw, name if name in TOOLS else draw.choice(("hermes", "qwen3_coder", "kimi_k2", "mistral")), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", TOOLS)
def test_many(name: str) -> None:
    draw = random.Random(f"{run_seed()} many {name}")
    for _ in range(20 * MESSAGES):
        check(draw, name, draw.choice((None, *REASONING)) if name != "openai" else None)


def test_all_formats_have_a_renderer() -> None:
    assert set(TOOLS) | set(SAME) == set(TOOL_FORMATS)
    assert all(TOOL_FORMATS[name] is TOOL_FORMATS[other] for name, other in SAME.items())
    assert {*REASONING, "openai_gptoss"} == set(REASONING_FORMATS)
