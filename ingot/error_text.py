"""Errors across a process border: as a JSON object, and raised again on the other side."""

from typing import Any

from ingot.ir.errors import IngotError, InternalError


def described(error: IngotError) -> dict[str, str]:
    """The error as strings by field."""
    return {
        "kind": type(error).__name__,
        "what": error.what,
        "where": error.where,
        "expected": error.expected,
        "hint": error.hint,
    }


def raised(fields: dict[str, Any]) -> IngotError:
    """The error that `described` described, to be raised; an InternalError for an unknown kind."""
    kinds: dict[str, type[IngotError]] = {}
    queue: list[type[IngotError]] = [IngotError]
    while queue:
        kind = queue.pop()
        kinds[kind.__name__] = kind
        queue += kind.__subclasses__()
    kind = kinds.get(str(fields.get("kind")), InternalError)
    return kind(fields["what"], where=fields["where"], expected=fields["expected"], hint=fields["hint"])
