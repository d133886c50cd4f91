"""Carry an error across a process boundary: encode it as a JSON object and rebuild it on the other side."""

from typing import Any

from ingot.ir.errors import IngotError, InternalError


def described(error: IngotError) -> dict[str, str]:
    """Return the error's fields as strings."""
    return {
        "kind": type(error).__name__,
        "what": error.what,
        "where": error.where,
        "expected": error.expected,
        "hint": error.hint,
    }


def raised(fields: dict[str, Any]) -> IngotError:
    """Return the error that `described` encoded, for the caller to raise; an InternalError for an unknown kind."""
    kinds: dict[str, type[IngotError]] = {}
    queue: list[type[IngotError]] = [IngotError]
    while queue:
        kind = queue.pop()
        kinds[kind.__name__] = kind
        queue += kind.__subclasses__()
    kind = kinds.get(str(fields.get("kind")), InternalError)
    return kind(fields["what"], where=fields["where"], expected=fields["expected"], hint=fields["hint"])
