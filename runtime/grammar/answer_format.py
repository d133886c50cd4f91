"""A grammar of a request as a format of structural tags, so that it can be a part of a larger one."""

import json
from typing import Any

from ingot.runtime.grammar.closed_schema import closed_schema
from ingot.runtime.grammar.lark import quoted
from ingot.runtime.grammar.params import StructuredOutputsParams


def format_of(params: StructuredOutputsParams) -> Any:
    """Return the format of `params` (`ingot.runtime.grammar.structural_tag`). Its options for white space are left out:
    they belong to the grammar as a whole."""
    if params.json is not None:
        schema = json.loads(params.json)
        closed = closed_schema(schema) if params.disable_additional_properties else schema
        return {"type": "json_schema", "json_schema": closed}
    if params.json_object is not None:
        return {"type": "json_schema", "json_schema": {"type": "object"}}
    if params.regex is not None:
        return {"type": "regex", "pattern": params.regex}
    if params.choice is not None:  # a terminal, as in `source_of`
        either = " | ".join(quoted(one) for one in params.choice)
        return {"type": "grammar", "grammar": f"start: CHOICE\nCHOICE: {either}\n"}
    if params.grammar is not None:
        return {"type": "grammar", "grammar": params.grammar}
    assert params.structural_tag is not None
    given = json.loads(params.structural_tag)
    return given["format"] if "format" in given else _of_structures(given)


def _of_structures(given: dict[str, Any]) -> Any:
    """Return the older form of a structural tag in the newer one. Malformed parts stay for later checks."""
    structures = given.get("structures")
    if isinstance(structures, list):
        structures = [_tag(one) if isinstance(one, dict) else one for one in structures]
    return {"type": "triggered_tags", "triggers": given.get("triggers"), "tags": structures}


def _tag(one: dict[str, Any]) -> dict[str, Any]:
    content = {"type": "json_schema", "json_schema": one.get("schema")}
    return {"type": "tag", "begin": one.get("begin"), "content": content, "end": one.get("end")}


def grammar_with(params: StructuredOutputsParams | None, form: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of StructuredOutputsParams for a format, with the options for white space of `params`."""
    fields: dict[str, Any] = {"structural_tag": {"format": form}}
    if params is not None:
        fields["disable_any_whitespace"] = params.disable_any_whitespace
        fields["whitespace_pattern"] = params.whitespace_pattern
    return fields
