"""How models write calls whose arguments are JSON, as formats of structural tags for the tools of a request.

A structural tag is a grammar (`ingot.runtime.grammar.structural_tag`). So the model writes its calls as it always does,
and the parser of its format reads them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ingot.runtime.grammar.closed_schema import closed_schema
from ingot.serve.parsers.tool_use import Tools

Format = dict[str, Any]
NAME, NUMBER = "NAME", "NUMBER"
# A call as an object. Chat templates write JSON with these spaces, and most models do so too.
OBJECT = f'{{"name": "{NAME}", "arguments": '
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class WrittenCalls:
    """The texts of calls. NAME in them is the name of the function, NUMBER an integer that the model chooses.

    begin     the text before the arguments of a call
    end       the text after them
    between   the text between two calls; None: a message has only one
    before    the text before the first call
    after     the text after the last call
    """

    begin: str
    end: str
    between: str | None = None
    before: str = ""
    after: str = ""

    def format(self, functions: Tools, *, several: bool) -> Format:
        """Return the format for one or more calls of these functions. Not `several`: for exactly one."""
        tags = [self._tag(name, function) for name, function in functions.items()]
        calls = {
            "type": "tags_with_separator",
            "separator": self.between or "",
            "tags": tags,
            "at_least_one": True,
            "stop_after_first": self.between is None or not several,
        }
        return sequence(fixed(self.before), calls, fixed(self.after))

    def _tag(self, name: str, function: Mapping[str, Any]) -> Format:
        begin, *rest = (part.replace(NAME, name) for part in self.begin.split(NUMBER))
        parts: list[Format] = []
        for part in rest:
            parts += [pattern("[0-9]{1,3}"), fixed(part)]
        return tag(begin, sequence(*parts, json_value(arguments_schema(function))), self.end)


# Calls in a form that no model needs to know, for formats whose arguments are not JSON.
LISTED = WrittenCalls(OBJECT, "}", ", ", "[", "]")


def objects(begin: str, end: str, between: str | None = "", arguments: str = "arguments") -> WrittenCalls:
    """Return the form of calls that are objects, with these texts around each of them."""
    return WrittenCalls(f'{begin}{{"name": "{NAME}", "{arguments}": ', f"}}{end}", between)


def listed(begin: str, end: str = "", between: str = ", ") -> WrittenCalls:
    """Return the form of calls in one list, with these texts around it."""
    return WrittenCalls(OBJECT, "}", between, f"{begin}[", f"]{end}")


def arguments_schema(function: Mapping[str, Any]) -> Any:
    """Return the JSON schema of a function's arguments, with no properties but those that it names. Without
    `parameters`, a function has no arguments, as for OpenAI."""
    schema = function.get("parameters")
    return _NO_ARGUMENTS if schema is None else closed_schema({"type": "object", **schema})


def fixed(text: str) -> Format:
    """Return the format of one text."""
    return {"type": "const_string", "value": text}


def pattern(expression: str) -> Format:
    """Return the format of texts that match a regular expression."""
    return {"type": "regex", "pattern": expression}


def json_value(schema: Any) -> Format:
    """Return the format of values of a JSON schema."""
    return {"type": "json_schema", "json_schema": schema}


def tag(begin: str, content: Format | None, end: str) -> Format:
    """Return the format of a content between two texts. None: any text up to the first `end`."""
    return {"type": "tag", "begin": begin, "content": content or {"type": "any_text"}, "end": end}


def sequence(*parts: Format) -> Format:
    """Return the format of several parts in a row. Empty texts are left out."""
    kept = [part for part in parts if part != fixed("")]
    return kept[0] if len(kept) == 1 else {"type": "sequence", "elements": kept or [fixed("")]}


def either(choices: Sequence[Format]) -> Format:
    """Return the format of any one of several choices."""
    return choices[0] if len(choices) == 1 else {"type": "or", "elements": list(choices)}
