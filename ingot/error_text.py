"""Carry an error across a process boundary: encode it as a JSON object and rebuild it on the other side."""

from typing import Any

from ingot.ir.errors import IngotError, InternalError


def encode_error(error: IngotError) -> dict[str, str]:
    """Return a dict of an error's class name and its four texts, which JSON can hold. `decode_error` reads it."""
    return {
        "kind": type(error).__name__,
        "what": error.what,
        "where": error.where,
        "expected": error.expected,
        "hint": error.hint,
    }


def decode_error(fields: dict[str, Any]) -> IngotError:
    """Return the error that `encode_error` wrote into the dict `fields`; the caller raises it.

    An unknown class becomes an InternalError.
    """
    kinds: dict[str, type[IngotError]] = {}
    queue: list[type[IngotError]] = [IngotError]
    while queue:
        kind = queue.pop()
        kinds[kind.__name__] = kind
        queue += kind.__subclasses__()
    kind = kinds.get(str(fields.get("kind")), InternalError)
    return kind(fields["what"], where=fields["where"], expected=fields["expected"], hint=fields["hint"])
