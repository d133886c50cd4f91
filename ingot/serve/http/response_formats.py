"""The grammar of a request: OpenAI's `response_format` and `text.format`, or vLLM's `structured_outputs`."""

from collections.abc import Mapping
from typing import Any

from ingot.serve.http.errors import HttpError, checked

_TYPES = '"text", "json_object", "json_schema" or "structural_tag"'


def grammar_of_format(form: object, field: str) -> dict[str, Any] | None:
    """Return the fields of StructuredOutputsParams for a response format; None if it has no grammar.

    form    {"type": …}, or None. A JSON schema is in its field `schema`, as in responses, or in `json_schema.schema`,
            as in chats
    field   the name of the format in errors

    Raises HttpError 400 for a malformed format.
    """
    if form is None:
        return None
    if not isinstance(form, Mapping):
        raise HttpError(400, f"{field} = {form!r:.80}; expected: an object", param=field)
    match form.get("type"):
        case "text":
            return None
        case "json_object":
            return {"json_object": True}
        case "json_schema":
            inner, where = (form["json_schema"], f"{field}.json_schema") if "json_schema" in form else (form, field)
            schema = inner.get("schema") if isinstance(inner, Mapping) else None
            checked(400, f"{where}.schema", schema, isinstance(schema, Mapping | bool), "a JSON schema")
            return {"json": schema}
        case "structural_tag":
            return {"structural_tag": {name: value for name, value in form.items() if name != "type"}}
        case kind:
            raise HttpError(400, f"{field}.type = {kind!r:.80}; expected: {_TYPES}", param=field)


def grammar_of(form: object, given: object, field: str) -> Any:
    """Return the grammar of a request: `given`, the value of its `structured_outputs`, or the one of its response
    format. Raises HttpError 400 if it has both, or a malformed format."""
    found = grammar_of_format(form, field)
    if found is not None and given is not None:
        raise HttpError(400, f"{field} and structured_outputs are set together; send one of them", param=field)
    return given if found is None else found
