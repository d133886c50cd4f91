"""Text that is no message of a format: damaged, cut off, or written to be slow. Parsers never raise."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable

import pytest
from cut_text import cut, parsed
from random_messages import random_message, random_text, tools_of
from rendered_messages import REASONING, TOOLS, rendered
from run_seed import again, run_seed

from ingot.serve.parsers.choice import reasoning_choice_of, tool_choice_of
from ingot.serve.parsers.events import Arguments, CallBegun, CallEnded, Content, Event, Parser
from ingot.serve.parsers.output_parser import OutputFormat
from ingot.serve.parsers.tool_use import ToolUse

pytestmark = pytest.mark.one_in_file(3)

FORMATS = {
    **{name: OutputFormat(tool_choice_of(name), None) for name in TOOLS},
    **{f"{name} reasoning": OutputFormat(tool_choice_of("hermes"), reasoning_choice_of(name)) for name in REASONING},
}
TOOLS_GIVEN = {"f": {"parameters": {"properties": {"a": {"type": "string"}, "b": {"type": "object"}}}}}


def damaged(draw: random.Random, text: str, marks: tuple[str, ...]) -> str:
    """Text with a part cut out, doubled, or replaced."""
    for _ in range(draw.randint(1, 3)):
        begin = draw.randint(0, len(text))
        end = min(len(text), begin + draw.choice((0, 1, 2, 10)))
        text = text[:begin] + draw.choice(("", text[begin:end] * 2, random_text(draw), draw.choice(marks))) + text[end:]
    return text


def well_formed(events: list[Event]) -> None:
    """Check that calls begin and end in order, with arguments only in between."""
    calls, begun = 0, False
    for event in events:
        match event:
            case CallBegun(index, name):
                assert not begun and index == calls and name
                begun = True
            case Arguments(index, _) | CallEnded(index):
                assert begun and index == calls
                if isinstance(event, CallEnded):
                    begun, calls = False, calls + 1
    assert not begun


@pytest.mark.parametrize("name", FORMATS)
def test_damaged(name: str) -> None:
    draw, form = random.Random(f"{run_seed()} damaged {name}"), FORMATS[name]
    for _ in range(60):
        message = random_message(draw)
        base = name.removesuffix(" reasoning")
        whole = rendered(message, base, None) if base in TOOLS else rendered(message, "hermes", base)
        text = damaged(draw, whole, form.marks or ("(",))
        results = []
        for pieces in ([text], cut(draw, text), list(text)):
            parser = form.parser(ToolUse(tools_of(message) or TOOLS_GIVEN), "")
            assert parser is not None
            results.append(parsed(parser, pieces))
        assert results[0] == results[1] == results[2], (text, again(name))
        well_formed(results[0])


@pytest.mark.parametrize(
    "name", ["hermes", "llama3_json", "mistral", "pythonic", "kimi_k2", "granite", "xlam", "step3"]
)
def test_text_without_calls_is_content(name: str) -> None:
    for text in ("", " ", "plain", "{", "[", "[x](y)", '{"a": 1}', "f(x) < 3 <tool", "[f(x) for x in y]", "\n\n a \n"):
        parser = FORMATS[name].parser(ToolUse(TOOLS_GIVEN), "")
        assert parser is not None
        assert parsed(parser, list(text)) == ([Content(text)] if text else [])


def test_what_breaks_off() -> None:
    """A call that has begun ends at the first wrong character, and what follows is content."""

    def events(text: str) -> list[Event]:
        parser = FORMATS["hermes"].parser(ToolUse(TOOLS_GIVEN), "")
        assert parser is not None
        return parsed(parser, [text])

    call = CallBegun(0, "f")
    open_call = '<tool_call>{"name": "f", "arguments": {"a": '
    assert events(f"{open_call}tru}} x") == [call, Arguments(0, '{"a": '), CallEnded(0, False), Content(" tru} x")]
    assert events(f'{open_call}"x') == [call, Arguments(0, '{"a": "x'), CallEnded(0, False)]
    assert events('<tool_call>{"name": "f"}') == [Content('<tool_call>{"name": "f"}')]
    assert events('<tool_call>{"name": 1, "arguments": {}}') == [Content('<tool_call>{"name": 1, "arguments": {}}')]
    assert events('<tool_call>{"arguments": "{\\"a\\": 1}", "name": "f"}')[1] == Arguments(0, '{"a": 1}')


def test_markers_are_held_back_only_while_they_can_be_one() -> None:
    parser = FORMATS["hermes"].parser(ToolUse(TOOLS_GIVEN), "")
    assert parser is not None
    assert parser.feed("a <tool") == [Content("a")]
    assert parser.feed("box>") == [Content(" <toolbox>")]
    assert parser.feed(" <tool_call>\n{") == []
    assert parser.feed('"name": "f", "arguments": {"a": "x') == [CallBegun(0, "f"), Arguments(0, '{"a": "x')]


def steps_of(make: Callable[[], Parser], text: str, size: int) -> int:
    """How many lines of the parsers run for a text in pieces of `size`: a measure of the work that has no noise."""
    lines = 0

    def trace(frame: object, event: str, _argument: object) -> object:
        nonlocal lines
        lines += event == "line"
        return trace

    parser = make()
    before = sys.gettrace()
    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        for begin in range(0, len(text), size):
            parser.feed(text[begin : begin + size])
        parser.finish()
    finally:
        sys.settrace(before)
    return lines


def hostile(form: OutputFormat, pattern: str, size: int) -> str:
    marks = form.marks or ("[f",)
    unit = {
        "openings": marks[0],
        "begins": marks[0][:-1],
        "all": "".join(marks),
        "brackets": '[{"a":',
        "object": '{"name": "f", "arguments": {',
        "quotes": '"\\',
        "blank": "\n ",
        "name": "f(a='",
    }[pattern]
    begin = marks[0] + '{"name": "' if pattern in ("quotes", "blank") else ""
    return (begin + unit * (size // len(unit) + 1))[:size]


PATTERNS = ("openings", "begins", "all", "brackets", "object", "quotes", "blank", "name")


def check_linear(name: str, size: int) -> None:
    form = FORMATS[name]

    def make() -> Parser:
        parser = form.parser(ToolUse(TOOLS_GIVEN), "")
        assert parser is not None
        return parser

    for pattern in PATTERNS:
        for whole in (False, True):
            small = steps_of(make, hostile(form, pattern, size), size if whole else 7)
            large = steps_of(make, hostile(form, pattern, 4 * size), 4 * size if whole else 7)
            assert large <= 5 * small + 2000, (pattern, whole, small, large)


@pytest.mark.parametrize("name", ["hermes", "mistral", "qwen3_coder", "pythonic", "openai", "qwen3 reasoning"])
def test_work_is_linear(name: str) -> None:
    check_linear(name, 600)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_work_is_linear_in_all_formats(name: str) -> None:
    check_linear(name, 2000)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_a_megabyte(name: str) -> None:
    """The regular expressions are linear too: a megabyte in one piece, and in small ones."""
    form = FORMATS[name]
    for pattern in PATTERNS:
        text = hostile(form, pattern, 1 << 20)
        for size in (len(text), 64):
            parser = form.parser(ToolUse(TOOLS_GIVEN), "")
            assert parser is not None
            well_formed(parsed(parser, (text[begin : begin + size] for begin in range(0, len(text), size))))
