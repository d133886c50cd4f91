"""Carry an error across a process boundary: encode it as a JSON object and rebuild it on the other side."""

from typing import Any

from ingot.ir.errors import IngotError, InternalError


def described(error: IngotError) -> dict[str, str]:
    """Return an error's class name ("kind") and its four texts as a dict that JSON can hold; `raised` decodes it."""
    return {
        "kind": type(error).__name__,
        "what": error.what,
        "where": error.where,
        "expected": error.expected,
        "hint": error.hint,
    }


def raised(fields: dict[str, Any]) -> IngotError:
    """Decode the dict that `described` made, and return the error for the caller to raise. An unknown class name
    becomes an InternalError.
    """
    kinds: dict[str, type[IngotError]] = {}
    queue: list[type[IngotError]] = [IngotError]
    while queue:
        kind = queue.pop()
        kinds[kind.__name__] = kind
        queue += kind.__subclasses__()
    kind = kinds.get(str(fields.get("kind")), InternalError)
    return kind(fields["what"], where=fields["where"], expected=fields["expected"], hint=fields["hint"])
