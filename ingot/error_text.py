"""Carry an error across a process boundary: encode it as a JSON object and rebuild it on the other side."""

from typing import Any

from ingot.ir.errors import IngotError, InternalError


def encode_error(error: IngotError) -> dict[str, str]:
    """Return an error's class name and four texts as a dict that JSON can hold. `decode_error` reverses it."""
    return {
        "kind": type(error).__name__,
        "what": error.what,
        "where": error.where,
        "expected": error.expected,
        "hint": error.hint,
    }


def decode_error(fields: dict[str, Any]) -> IngotError:
    """Rebuild the error from the dict of `encode_error`; the caller raises it. An unknown class becomes an
    InternalError.
    """
    kinds: dict[str, type[IngotError]] = {}
    queue: list[type[IngotError]] = [IngotError]
    while queue:
        kind = queue.pop()
        kinds[kind.__name__] = kind
        queue += kind.__subclasses__()
    kind = kinds.get(str(fields.get("kind")), InternalError)
    return kind(fields["what"], where=fields["where"], expected=fields["expected"], hint=fields["hint"])
