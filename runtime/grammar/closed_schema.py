"""JSON schemas whose objects have only the properties that they name."""

from typing import Any

# Keywords of JSON schemas whose value maps names to schemas, and those whose value is data.
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_VALUES = ("const", "enum", "default", "examples")
# Keywords next to which `properties` names only some of an object's properties.
_OTHERS = ("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "patternProperties")


def closed_schema(schema: Any) -> Any:
    """Return a JSON schema whose objects have only the properties that it names, unless it says otherwise.

    A schema with `allOf` stays as it is: the properties of an object may be in several of its parts."""
    return schema if _combines(schema) else _closed(schema)


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed: dict[str, Any] = {}
    for name, one in schema.items():
        if name in _MAPS and isinstance(one, dict):
            closed[name] = {key: _closed(value) for key, value in one.items()}
        else:
            closed[name] = one if name in _VALUES else _closed(one)
    stated = "additionalProperties" in schema or any(name in schema for name in _OTHERS)
    if isinstance(schema.get("properties"), dict) and not stated:
        closed["additionalProperties"] = False
    return closed


def _combines(schema: Any) -> bool:
    """Return whether a schema or a part of it has `allOf`."""
    if isinstance(schema, list):
        return any(map(_combines, schema))
    if not isinstance(schema, dict):
        return False
    if "allOf" in schema:
        return True
    for name, one in schema.items():
        parts = one.values() if name in _MAPS and isinstance(one, dict) else () if name in _VALUES else (one,)
        if any(map(_combines, parts)):
            return True
    return False
