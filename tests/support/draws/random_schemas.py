"""Random JSON schemas of the keywords that llguidance supports, which random texts complete soon."""

from __future__ import annotations

import random
from typing import Any

_NAMES = ["a", "b", "id", "name", "tags", "été", "x y", 'q"']
_PATTERNS = ["^[a-z]{1,5}$", "^(ab|cd)+$", "^[0-9]{3}-[0-9]{4}$", "^$|^x"]


def schema(draw: random.Random, depth: int = 3) -> dict[str, Any]:
    """Return a schema whose values are nested at most `depth` deep."""
    kinds = [_string, _integer, _number, _constant, _enumeration]
    if depth:
        kinds += [_array, _object, _object, _either, _referred]
    return draw.choice(kinds)(draw, depth)


def _string(draw: random.Random, depth: int) -> dict[str, Any]:
    match draw.randrange(4):
        case 0:
            return {"type": "string", "pattern": draw.choice(_PATTERNS)}
        case 1:
            return {"type": "string", "format": draw.choice(["date", "uuid", "ipv4", "time"])}
        case _:
            least = draw.randrange(3)
            return {"type": "string", "minLength": least, "maxLength": least + draw.randrange(8)}


def _integer(draw: random.Random, depth: int) -> dict[str, Any]:
    low = draw.randint(-200, 200)
    some = {"type": "integer", "minimum": low, "maximum": low + draw.randrange(300)}
    return draw.choice([some, {"type": "integer", "exclusiveMinimum": low, "maximum": low + 9}, {"type": "boolean"}])


def _number(draw: random.Random, depth: int) -> dict[str, Any]:
    low = draw.randint(-50, 50)
    return {"type": "number", "minimum": low, "maximum": low + draw.randint(1, 99) / 4}


def _constant(draw: random.Random, depth: int) -> dict[str, Any]:
    return {"const": draw.choice([None, True, 17, -0.5, "text", [1, [2]], {"k": "v"}])}


def _enumeration(draw: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": draw.sample(["red", "green", 3, None, False, 'a"b\\c', "日本"], draw.randint(1, 5))}


def _array(draw: random.Random, depth: int) -> dict[str, Any]:
    least = draw.randrange(3)
    some: dict[str, Any] = {"type": "array", "items": schema(draw, depth - 1), "minItems": least}
    some["maxItems"] = least + draw.randrange(3)
    if draw.random() < 0.3:
        some["prefixItems"] = [schema(draw, depth - 1)]
    return some


def _object(draw: random.Random, depth: int) -> dict[str, Any]:
    names = draw.sample(_NAMES, draw.randint(1, 4))
    properties = {name: schema(draw, depth - 1) for name in names}
    required = draw.sample(names, draw.randint(0, len(names)))
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _either(draw: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [schema(draw, depth - 1) for _ in range(draw.randint(1, 3))]}


def _referred(draw: random.Random, depth: int) -> dict[str, Any]:
    """A schema with definitions of its own, one of them a list that may contain itself."""
    name = f"d{depth}"
    tree = {
        "type": "object",
        "properties": {"v": schema(draw, 0), "next": {"anyOf": [{"type": "null"}, {"$ref": f"#/$defs/{name}"}]}},
        "required": ["v", "next"],
        "additionalProperties": False,
    }
    return {"$defs": {name: tree}, "$ref": f"#/$defs/{name}"} if depth == 3 else tree["properties"]["v"]
