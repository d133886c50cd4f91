"""Arguments that a format writes as plain text, converted to the types of the tool's JSON schema."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from ingot.serve.parsers.values import PYTHON, converted

Types = frozenset[str]

# Types in the order in which they are tried: a text such as "1" may be several of them.
_ORDER = ("null", "integer", "number", "boolean", "object", "array", "string")
STRING: Types = frozenset(("string",))
ANY: Types = frozenset(("any",))  # a JSON value, or else a string
# Names of types that tools have besides those of JSON schemas.
_ALIASES = {
    **dict.fromkeys(("str", "text", "varchar", "char", "enum"), "string"),
    **dict.fromkeys(("int", "int32", "int64", "uint", "uint32", "uint64", "long", "short", "unsigned"), "integer"),
    **dict.fromkeys(("float", "float32", "float64", "double"), "number"),
    **dict.fromkeys(("bool", "binary"), "boolean"),
    **dict.fromkeys(("dict", "map"), "object"),
    **dict.fromkeys(("list", "arr", "tuple", "sequence"), "array"),
}
_KINDS = ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array"), (dict, "object"))
# Schemas may refer to themselves, and a deeper one says nothing about the type of an argument.
_MAX_DEPTH = 16
_INTEGER = re.compile(r"[+-]?[0-9]{1,400}")


class ArgumentTypes:
    """The types of a function's arguments. `tool` is the function of a tool, with its JSON schema as "parameters"."""

    def __init__(self, tool: Mapping[str, Any]) -> None:
        self._root = _object(tool.get("parameters"))
        self._properties = _object(self._root.get("properties"))

    def types_of(self, name: str) -> Types:
        """Return the types of an argument; that of a string if the schema does not say."""
        return self._types(self._properties.get(name), 0) or STRING

    def _types(self, given: object, depth: int) -> Types:
        schema = _object(given)
        if depth > _MAX_DEPTH:
            return frozenset()
        listed = schema.get("type")
        names = listed if isinstance(listed, list) else [listed]
        types = {_ALIASES.get(name.lower(), name.lower()) for name in names if isinstance(name, str)}
        values = schema.get("enum")
        for value in values if isinstance(values, list) else [schema["const"]] if "const" in schema else []:
            types.add(next((name for kind, name in _KINDS if isinstance(value, kind)), "null"))
        types |= {name for field, name in (("properties", "object"), ("items", "array")) if field in schema}
        for field in ("anyOf", "oneOf", "allOf"):
            choices = schema.get(field)
            for one in choices if isinstance(choices, list) else ():
                types |= self._types(one, depth + 1)
        if isinstance(reference := schema.get("$ref"), str):
            types |= self._types(self._referred(reference), depth + 1)
        return frozenset(types)

    def _referred(self, reference: str) -> object:
        """Return the schema at a reference such as "#/$defs/City"."""
        found: object = self._root
        for part in reference.removeprefix("#/").split("/"):
            found = _object(found).get(part)
        return found


def json_of(text: str, types: Types) -> str:
    """Return an argument's text as JSON: of the first of its types that fits, or else as a string."""
    bare = text.strip()
    for name in _ORDER:
        if name in types and (value := _as_type(bare, name)) is not None:
            return value
    if not types <= set(_ORDER) and (value := _parsed(bare)) is not None:
        return value
    return json.dumps(text, ensure_ascii=False)


def _as_type(text: str, name: str) -> str | None:
    """Return text as JSON of a type; None if it is none, and for strings."""
    match name:
        case "null":
            return "null" if text.lower() in ("null", "none") else None
        case "integer":
            return str(int(text)) if _INTEGER.fullmatch(text) else None
        case "number":
            return _number(text)
        case "boolean":
            return {"true": "true", "1": "true", "false": "false", "0": "false"}.get(text.lower())
        case "object" | "array":
            return _parsed(text, "{" if name == "object" else "[")
        case _:
            return None


def _number(text: str) -> str | None:
    try:
        value = float(text)
    except ValueError:
        return None
    if not math.isfinite(value):
        return None
    return str(int(value)) if value.is_integer() else repr(value)


def _parsed(text: str, begin: str = "") -> str | None:
    """Return text that is JSON, or in Python's notation, as JSON; None for other text, or a value that does not begin
    with `begin`."""
    if not text.startswith(begin):
        return None
    try:
        return json.dumps(json.loads(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return converted(text, PYTHON)


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
