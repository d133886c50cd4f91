"""Bodies of requests: read within limits, decoded from JSON, and converted to the class of the route."""

import asyncio
import logging
import re
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from ingot.serve.http.errors import HttpError
from ingot.serve.http.options import HttpOptions

log = logging.getLogger("ingot.serve")
Fields = TypeVar("Fields", bound=msgspec.Struct)

_DECODER = msgspec.json.Decoder()
# Deeper than JSON schemas of tools nest. Python's own limit of recursion is near a thousand, and differs by call: what
# was decoded could still fail when it is shown in an error, or encoded in an answer.
_MAX_DEPTH = 128
_STRING = re.compile(rb'"[^"]*"')
_TO_LISTS = bytes.maketrans(b"{}", b"[]")
_NO_STRUCTURE = bytes(set(range(256)) - set(b'{}[]"'))
# A client could fill the log, and this set, with ever new names.
_MAX_WARNED = 100
_warned: set[str] = set()


async def read_fields(request: Request, kind: type[Fields], options: HttpOptions) -> Fields:
    """Return the JSON object in a request's body as `kind`.

    An unknown field is logged once, or refused if the options say strict. Raises HttpError: 400 if the body is no such
    object, 408 if it takes too long, 413 if it is too long.
    """
    content = await _read(request, options)
    try:
        fields = _DECODER.decode(content)
    except ValueError as error:  # msgspec.DecodeError, and UnicodeDecodeError
        raise HttpError(400, f"the body is no JSON: {error}") from None
    except RecursionError:
        raise HttpError(400, "the body is nested too deeply") from None
    if _is_deep(content):
        raise HttpError(400, f"the body is nested too deeply; expected: at most {_MAX_DEPTH} levels")
    if not isinstance(fields, dict):
        raise HttpError(400, f"the body is a JSON {type(fields).__name__}; expected: an object")
    _check_names(fields, kind, options)
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise HttpError(400, str(error), param=_path(str(error))) from None
    except RecursionError:
        raise HttpError(400, "the body is nested too deeply") from None


def body_schema(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the part of a route's OpenAPI schema that describes its body, a JSON object of class `kind`."""
    _, schemas = msgspec.json.schema_components([kind], ref_template="#/components/schemas/{name}")
    schema = schemas.pop(kind.__name__)
    for name, inner in schemas.items():  # a schema of one class only: its parts are written in place
        schema["properties"] = {
            field: inner if _refers(one, name) else one for field, one in schema["properties"].items()
        }
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _refers(schema: Any, name: str) -> bool:
    """Return whether the schema of a field refers to a class, alone or as one of several types."""
    reference = {"$ref": f"#/components/schemas/{name}"}
    return schema == reference or reference in schema.get("anyOf", ())


async def _read(request: Request, options: HttpOptions) -> bytes:
    declared = request.headers.get("content-length", "0")
    too_long = HttpError(413, f"the body is too long; expected: at most {options.max_body} bytes")
    if declared.isdecimal() and int(declared[:20]) > options.max_body:
        raise too_long
    pieces: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(options.read_seconds):
            async for piece in request.stream():
                pieces.append(piece)
                size += len(piece)
                if size > options.max_body:
                    raise too_long
    except TimeoutError:
        raise HttpError(408, f"the body did not arrive within {options.read_seconds:g} s") from None
    except ClientDisconnect:
        raise HttpError(400, "the client left while it sent the body") from None
    return b"".join(pieces)


def _is_deep(content: bytes) -> bool:
    """Return whether valid JSON has more than _MAX_DEPTH levels of objects and lists.

    It removes all but brackets, then the innermost brackets once for each level. That takes milliseconds for a
    megabyte; a walk through the decoded values of as many token ids would take a hundred.
    """
    if content.count(b"[") + content.count(b"{") <= _MAX_DEPTH:
        return False
    unescaped = content.replace(rb"\\", b"").replace(rb"\"", b"")
    # Two adjacent quotes are an empty string, or the end of one string and the begin of the next, which then merge.
    structure = unescaped.translate(_TO_LISTS, _NO_STRUCTURE).replace(b'""', b"")
    brackets = _STRING.sub(b"", structure)
    for _ in range(_MAX_DEPTH):
        brackets = brackets.replace(b"[]", b"")
        if not brackets:
            return False
    return True


def _check_names(fields: dict[str, Any], kind: type[msgspec.Struct], options: HttpOptions) -> None:
    unknown = fields.keys() - set(kind.__struct_fields__)
    for name in sorted(unknown):
        if options.strict:
            raise HttpError(400, f"Unrecognized request argument supplied: {name[:80]}", param=name[:80])
        if name not in _warned and len(_warned) < _MAX_WARNED:
            _warned.add(name)
            log.warning("requests have the unknown field %r, which has no effect", name[:80])


def _path(message: str) -> str | None:
    """Return the field that a message of msgspec names, as in "… - at `$.temperature`"."""
    before, found, after = message.rpartition(" - at `$.")
    return after.rstrip("`") if found and before else None
