"""How models write calls in tags, as formats of structural tags for the tools of a request.

Between tags, a string is plain text and other values are JSON. So not all schemas can be followed there: a text between
tags has no quotes, so it has no grammar for its length, or for a choice between a string and a number.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ingot.serve.parsers.schema_types import ArgumentTypes
from ingot.serve.parsers.tool_use import Tools
from ingot.serve.parsers.written_calls import NAME, Format, arguments_schema, either, fixed, json_value, sequence, tag

# Keywords that say nothing about which values are valid.
_NOTES = frozenset(("title", "description", "default", "examples", "$comment", "deprecated", "$schema", "strict"))
_DEFINITIONS = ("$defs", "definitions")
_ROOT = _NOTES | {"type", "properties", "required", "additionalProperties", *_DEFINITIONS}
_KEY = re.compile(r"[\w.\-]{1,256}")
_MAX_TEXTS = 1000  # a rule of llguidance has at most 2000 alternatives
_STRINGS = frozenset(("string", "any"))


@dataclass(frozen=True)
class WrittenTags:
    """The texts of calls in tags. NAME in them is the name of the function, or of the argument.

    begin         the text before the arguments of a call
    key           the text before a value that is a string
    value_end     the text that ends a value
    end           the text after the arguments
    json_key      the text before another value; "": `key`
    gap           the text between such a value and `value_end`; after free text, the model chooses
    after_value   the text after `value_end`
    between       the text between two calls
    before        the text before the first call
    after         the text after the last call
    """

    begin: str
    key: str
    value_end: str
    end: str
    json_key: str = ""
    gap: str = ""
    after_value: str = "\n"
    between: str = ""
    before: str = ""
    after: str = ""

    def format(self, functions: Tools, *, several: bool) -> Format | None:
        """Return the format for one or more calls of these functions. Not `several`: for exactly one.

        None if a schema cannot be followed between tags."""
        tags: list[Format] = []
        for name, function in functions.items():
            arguments = self._arguments(function)
            if arguments is None:
                return None
            tags.append(tag(self.begin.replace(NAME, name), sequence(*arguments), self.end))
        calls = {
            "type": "tags_with_separator",
            "separator": self.between,
            "tags": tags,
            "at_least_one": True,
            "stop_after_first": not several,
        }
        return sequence(fixed(self.before), calls, fixed(self.after))

    def _arguments(self, function: Mapping[str, Any]) -> list[Format] | None:
        root = arguments_schema(function)
        required = root.get("required", [])
        properties = root.get("properties", {})
        known = isinstance(required, list) and all(isinstance(one, str) and one in properties for one in required)
        if not known or root.keys() - _ROOT or root.get("additionalProperties"):
            return None
        types = ArgumentTypes({"parameters": root})
        made: list[Format] = []
        for key, schema in properties.items():
            value = self._value(key, schema, root, types) if _KEY.fullmatch(key) else None
            if value is None:
                return None
            made.append(value if key in required else _optional(value))
        return made

    def _value(self, key: str, schema: Any, root: Mapping[str, Any], types: ArgumentTypes) -> Format | None:
        """Return the format of an argument and the texts around it. None: its schema cannot be followed."""
        after = fixed(self.after_value)
        found = _referred(schema, root)
        if _any_text(found):
            begin, content, gap = self.key, None, ""
        elif (texts := _texts(found)) is not None:
            if any(self.value_end in one or one.strip() != one for one in texts):
                return None
            begin, content, gap = self.key, either([fixed(one) for one in texts]), self.gap
        elif types.types_of(key) & _STRINGS or not _is_local(schema):
            return None
        else:
            defined = {name: root[name] for name in _DEFINITIONS if name in root}
            begin, content, gap = self.json_key or self.key, json_value({**schema, **defined}), self.gap
        return sequence(tag(begin.replace(NAME, key), content, gap + self.value_end), after)


def _optional(part: Format) -> Format:
    return {"type": "tags_with_separator", "separator": "", "tags": [tag("", part, "")], "stop_after_first": True}


def _referred(schema: Any, root: Mapping[str, Any]) -> Any:
    """Return the schema that a schema refers to, if it has no other keywords."""
    if not isinstance(schema, dict) or schema.keys() - _NOTES != {"$ref"}:
        return schema
    _, *path = str(schema["$ref"]).split("/")
    if len(path) != 2 or path[0] not in _DEFINITIONS:
        return schema
    definitions = root.get(path[0])
    return definitions.get(path[1], schema) if isinstance(definitions, dict) else schema


def _any_text(schema: Any) -> bool:
    """Return whether each text is a valid value, as `schema_types.json_of` reads it."""
    if not isinstance(schema, dict):
        return False
    keywords = schema.keys() - _NOTES
    if keywords == {"anyOf"} and isinstance(schema["anyOf"], list):
        return any(map(_any_text, schema["anyOf"])) and all(map(_any_of_type, schema["anyOf"]))
    if keywords == {"type"}:
        listed = schema["type"]
        return "string" in listed if isinstance(listed, list) else listed == "string"
    return not keywords


def _any_of_type(schema: Any) -> bool:
    """Return whether a schema names types and nothing else."""
    return isinstance(schema, dict) and schema.keys() - _NOTES == {"type"}


def _texts(schema: Any) -> list[str] | None:
    """Return the values of a schema that lists strings; None if it does not."""
    if not isinstance(schema, dict) or schema.keys() - _NOTES - {"type", "enum", "const"}:
        return None
    if schema.get("type", "string") != "string":
        return None
    values = schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else None
    good = (
        isinstance(values, list)
        and 0 < len(values) <= _MAX_TEXTS
        and all(isinstance(one, str) and one for one in values)
    )
    return list(dict.fromkeys(values)) if good and isinstance(values, list) else None


def _is_local(schema: Any) -> bool:
    """Return whether a schema refers to definitions only."""
    if isinstance(schema, list):
        return all(map(_is_local, schema))
    if not isinstance(schema, dict):
        return not isinstance(schema, bool)
    reference = schema.get("$ref", "#/$defs/")
    local = isinstance(reference, str) and reference.startswith(("#/$defs/", "#/definitions/"))
    return local and all(_is_local(one) for one in schema.values() if isinstance(one, list | dict))
