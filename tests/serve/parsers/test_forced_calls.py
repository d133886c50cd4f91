"""Random texts of the grammars of calls: the parser of each format reads them as valid calls, and as nothing else."""

from __future__ import annotations

import contextlib
import json
import random
from functools import cache
from typing import Any

import pytest
from cut_text import cut, parsed
from drawn import drawn
from grammar_walk import GrammarWalk
from jsonschema import Draft202012Validator
from random_grammars import function_schema
from random_messages import Message, random_text
from rendered_messages import REASONING, TOOLS
from run_seed import again, run_seed

from ingot.ir.errors import RequestError
from ingot.serve.parsers.choice import reasoning_choice_of, tool_choice_of
from ingot.serve.parsers.events import Arguments, CallBegun, CallEnded, Content, Event
from ingot.serve.parsers.json_calls import JsonForm
from ingot.serve.parsers.named_calls import NamedForm
from ingot.serve.parsers.output_grammar import message_format
from ingot.serve.parsers.output_parser import OutputFormat, PluggedIn
from ingot.serve.parsers.reasoning import ReasoningForm
from ingot.serve.parsers.tagged_calls import TaggedForm
from ingot.serve.parsers.tool_formats import TOOL_FORMATS
from ingot.serve.parsers.tool_use import ToolUse
from ingot.serve.parsers.written_calls import arguments_schema, json_value

pytestmark = pytest.mark.one_in_file(3)

CITY = {"type": "object", "properties": {"name": {"enum": ["Oslo", 'a"b', "é"]}}, "required": ["name"]}
PARAMETERS: dict[str, Any] = {
    "time": None,
    "NUMBER": {"type": "object", "properties": {}},
    "weather/x.y": {
        "type": "object",
        "properties": {
            "city": {"$ref": "#/$defs/City"},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
            "note": {"type": ["string", "null"], "maxLength": 3},
            "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        },
        "required": ["city", "days"],
        "$defs": {"City": CITY},
    },
    "sum": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"anyOf": [CITY, {"type": "string"}]}}},
}
FUNCTIONS = {name: {"name": name, "parameters": schema} for name, schema in PARAMETERS.items()}
ANSWER = json_value({"type": "object", "properties": {"k": {"type": "integer"}}, "required": ["k"]})
FORMATS = {
    **{name: OutputFormat(tool_choice_of(name), None) for name in TOOL_FORMATS},
    **{f"{name} reasoning": OutputFormat(tool_choice_of("hermes"), reasoning_choice_of(name)) for name in REASONING},
    "no parser": OutputFormat(None, None),
    "llama3_json reasoning": OutputFormat(tool_choice_of("llama3_json"), reasoning_choice_of("qwen3")),
}


@cache
def walk(name: str) -> GrammarWalk:
    """Every second format has special tokens as markers."""
    marks = FORMATS[name].marks if sorted(FORMATS).index(name) % 2 else ()
    return GrammarWalk([mark for mark in dict.fromkeys(marks) if mark[0] in "<["])


def reasoning(form: OutputFormat, prompt: str, draw: random.Random) -> str:
    """Random reasoning after a prompt, or the begin of a message without any."""
    if not isinstance(form.reasoning, ReasoningForm):
        return ""
    begun = form.reasoning.begun_by(prompt, continues=False)
    if not begun and draw.random() < 0.3:
        return "<tool_call>" if form.tools is tool_choice_of("hermes") else "{"
    text = random_text(draw).strip() + draw.choice(form.reasoning.ends) + draw.choice(("", "\n", "\n\n"))
    return text if begun else draw.choice(form.reasoning.begins) + text


def random_form(name: str, draw: random.Random, use: ToolUse, answer: Any = None) -> tuple[str, list[Event]]:
    form = FORMATS[name]
    prompt = draw.choice(("", "<think>\n", "<think>\n\n</think>\n\n"))
    made = message_format(form, use, prompt, answer)
    assert made is not None
    text = walk(name).text(made, draw, reasoning(form, prompt, draw))
    parser = form.parser(use, prompt)
    if parser is None:
        return text, [Content(text)]
    events = parsed(parser, cut(draw, text))
    other = form.parser(use, prompt)
    assert other is not None and events == parsed(other, [text])
    return text, events


def calls_of(events: list[Event]) -> list[tuple[str, Any]]:
    calls: list[tuple[str, Any]] = []
    name, arguments = "", ""
    for event in events:
        match event:
            case CallBegun(_, begun):
                name, arguments = begun, ""
            case Arguments(_, text):
                arguments += text
            case CallEnded(_, complete):
                assert complete
                calls.append((name, json.loads(arguments)))
    return calls


@pytest.mark.parametrize("name", FORMATS)
def test_forced_calls(name: str) -> None:
    draw = random.Random(f"{run_seed()} {name}")
    for _ in range(4):
        names = draw.sample(list(FUNCTIONS), draw.randint(1, 3))
        use = ToolUse({one: FUNCTIONS[one] for one in names}, forced=True, several=draw.random() < 0.6)
        text, events = random_form(name, draw, use)
        assert not any(isinstance(event, Content) for event in events), (text, again(name))
        calls = calls_of(events)
        assert calls and (use.several or len(calls) == 1), (text, again(name))
        for called, arguments in calls:
            assert called in names, (text, again(name))
            Draft202012Validator(arguments_schema(FUNCTIONS[called])).validate(arguments)


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "no parser"])
def test_an_answer_with_a_format_beside_tools(name: str) -> None:
    """The message is the answer, or calls."""
    draw, kinds = random.Random(f"{run_seed()} answer {name}"), set()
    form, use = FORMATS[name], ToolUse(FUNCTIONS)
    if form.is_harmony or (isinstance(form.tools, JsonForm | NamedForm) and form.tools.written):
        for _ in range(6):
            text, events = random_form(name, draw, use, ANSWER)
            content = "".join(event.text for event in events if isinstance(event, Content))
            calls = calls_of(events)
            assert bool(calls) != bool(content), (text, again(name))
            if content:
                assert isinstance(json.loads(content)["k"], int), (text, again(name))
            kinds.add(bool(calls))
        return
    made = message_format(form, use, "", ANSWER)
    assert made is not None and walk(name).accepts(made, '{"k": 1}') and not walk(name).accepts(made, "text")
    assert form.tools is not None and not isinstance(form.tools, str | PluggedIn)
    openings = form.tools.machine({}).openings.texts or ("[time(",)
    for mark in openings:
        assert walk(name).accepts(made, f"{mark}any text")


COLOR = {"type": "string", "enum": ["red", "dark red"]}
IN_TAGS: dict[str, Any] = {
    "type": "object",
    "title": "Paint",
    "properties": {
        "text": {"type": "string", "description": "d"},
        "color": {"$ref": "#/$defs/Color"},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "flag": {"type": ["boolean", "null"]},
        "colors": {"type": "array", "items": {"$ref": "#/$defs/Color"}, "maxItems": 2},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        "any": {},
    },
    "required": ["color", "count"],
    "$defs": {"Color": COLOR},
}
TAGGED = [name for name, form in TOOL_FORMATS.items() if isinstance(form, TaggedForm)]
TAGS = ("</function>", "<parameter=x>", "</invoke>", '<invoke name="x">', "<arg_key>", "</tool_call>")


def drawn_arguments(draw: random.Random) -> dict[str, Any]:
    """Arguments of IN_TAGS. Texts have tags of other parts of a call."""

    def text() -> str:
        return (random_text(draw) + draw.choice(("", *TAGS)) + random_text(draw)).strip() or "a"

    colors = COLOR["enum"]
    some = {
        "text": text(),
        "color": draw.choice(colors),
        "count": draw.randrange(100),
        "flag": draw.choice((True, False, None)),
        "colors": draw.choices(colors, k=2),
        "note": "a" + text(),
        "any": text(),
    }
    return {key: value for key, value in some.items() if key in IN_TAGS["required"] or draw.random() < 0.5}


@pytest.mark.parametrize("name", TAGGED)
def test_calls_in_tags(name: str) -> None:
    """Calls as the chat template writes them are texts of the grammar, and are read as they were."""
    draw, form, plain = random.Random(f"{run_seed()} tags {name}"), FORMATS[name], GrammarWalk()
    functions = {one: {"name": one, "parameters": IN_TAGS} for one in ("paint", "paint_all")}
    use = ToolUse(functions, forced=True)
    made = message_format(form, use, "", None)
    assert made is not None and form.calls(use) and isinstance(form.tools, TaggedForm)
    renderer = TOOLS["qwen3_coder" if TOOL_FORMATS[name] is TOOL_FORMATS["qwen3_coder"] else name]
    for _ in range(20):
        calls = [(draw.choice(list(functions)), drawn_arguments(draw)) for _ in range(draw.randint(1, 3))]
        text = renderer(Message(calls=calls)).strip()
        if any(form.tools.parameter[1] in str(value) for _, values in calls for value in values.values()):
            continue
        assert plain.accepts(made, text), (text, again(name))
        parser = form.parser(use, "")
        assert parser is not None and calls_of(parsed(parser, cut(draw, text))) == calls, (text, again(name))


@pytest.mark.parametrize("name", TAGGED)
def test_random_calls_in_tags(name: str) -> None:
    draw = random.Random(f"{run_seed()} random tags {name}")
    kept = {key: schema for key, schema in IN_TAGS["properties"].items() if key not in ("text", "note", "any")}
    functions = {"paint": {"name": "paint", "parameters": {**IN_TAGS, "properties": kept}}}
    for _ in range(8):
        use = ToolUse(functions, forced=True, several=draw.random() < 0.5)
        assert FORMATS[name].calls(use)
        text, events = random_form(name, draw, use)
        assert not any(isinstance(event, Content) for event in events), (text, again(name))
        for _, arguments in calls_of(events):
            Draft202012Validator(functions["paint"]["parameters"]).validate(arguments)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"type": "string", "maxLength": 3}}},
        {"properties": {"a": {"type": ["string", "integer"], "minimum": 3}}},
        {"properties": {"a": {"oneOf": [{"type": "string"}, {"type": "null"}]}}},
        {"properties": {"a": {"enum": ["a", 1]}}},
        {"properties": {"a": {"enum": [" a"]}}},
        {"properties": {"a": {"enum": ["a</parameter>"]}}},
        {"properties": {"a": {"enum": []}}},
        {"properties": {"a": True}},
        {"properties": {"a b": {"type": "integer"}}},
        {"properties": {"a": {"type": "array", "items": {"$ref": "#/properties/b"}}, "b": {"type": "integer"}}},
        {"properties": {}, "required": ["a"]},
        {"additionalProperties": {"type": "string"}},
        {"anyOf": [{"required": ["a"]}]},
    ],
)
def test_schemas_that_tags_cannot_follow(schema: dict[str, Any]) -> None:
    """The calls then come as a list in JSON."""
    form = OutputFormat(tool_choice_of("qwen3_coder"), None)
    use = ToolUse({"f": {"name": "f", "parameters": {"type": "object", **schema}}}, forced=True)
    assert not form.calls(use)
    parser = form.parser(use, "")
    assert parser is not None
    events = parsed(parser, ['[{"name": "f", "arguments": {"a": 1}}]'])
    assert calls_of(events) == [("f", {"a": 1})]


@pytest.mark.parametrize("name", drawn(1, ["qwen3_coder", "glm47", "hermes", "pythonic"]))
def test_odd_schemas(name: str) -> None:
    """A grammar is made of any schema, or it is refused."""
    draw, form = random.Random(f"{run_seed()} odd {name}"), FORMATS[name]
    for _ in range(20):
        function = {"name": "f", "parameters": function_schema(draw)}
        use = ToolUse({"f": function}, forced=draw.random() < 0.7)
        made = message_format(form, use, "", ANSWER)
        assert made is not None and form.parser(use, "") is not None
        with contextlib.suppress(RequestError):
            walk(name).matcher(made)


def test_a_parser_of_another_package() -> None:
    """Its form is unknown: forced calls come as a list, and an answer with a format excludes tools."""
    form = OutputFormat(PluggedIn(lambda _tools: pytest.fail("not used")), None)
    use = ToolUse({"f": {"name": "f"}}, forced=True)
    parser = form.parser(use, "")
    assert parser is not None
    assert calls_of(parsed(parser, ['[{"name": "f", "arguments": {}}]'])) == [("f", {})]
    with pytest.raises(RequestError, match="together with tools"):
        message_format(form, ToolUse(use.functions), "", ANSWER)


def test_messages_that_continue_one() -> None:
    """Reasoning that the prompt has begun goes on, and a message that has begun to answer has none."""
    use = ToolUse({"f": {"name": "f"}}, forced=True)
    form = OutputFormat(tool_choice_of("hermes"), reasoning_choice_of("qwen3"))
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    found = GrammarWalk()
    for prompt, continues, text, good in (
        ("<think> Hm", True, f"m.</think>\n\n{call}", True),
        ("<think> Hm", True, call, False),
        ("<think></think> I", True, call, True),
        ("<think></think> I", True, f"<think></think>{call}", False),
        ("", False, f"<think>a</think>{call}", True),
        ("", False, call, True),
        ("", False, f"I call. {call}", False),
    ):
        made = message_format(form, use, prompt, None, continues=continues)
        assert made is not None and found.accepts(made, text) == good, (prompt, text)
