"""Carry an error across a process boundary: encode it as a JSON object and rebuild it on the other side."""

from typing import Any

from ingot.ir.errors import IngotError, InternalError, UserBackendError


def encode_error(error: IngotError) -> dict[str, str]:
    """Return an error as a dict that JSON can hold: its class name, and the texts what, where, expected and hint.

    A UserBackendError also has the name of its backend. `decode_error` reads the dict.
    """
    return {
        "kind": type(error).__name__,
        "what": error.what,
        "where": error.where,
        "expected": error.expected,
        "hint": error.hint,
        **({"backend": error.backend} if isinstance(error, UserBackendError) else {}),
    }


def decode_error(fields: dict[str, Any]) -> IngotError:
    """Return the error that `encode_error` stored in the dict `fields`. The error is not raised.

    An unknown class becomes an InternalError.
    """
    kinds: dict[str, type[IngotError]] = {}
    queue: list[type[IngotError]] = [IngotError]
    while queue:
        kind = queue.pop()
        kinds[kind.__name__] = kind
        queue += kind.__subclasses__()
    kind = kinds.get(str(fields.get("kind")), InternalError)
    texts = {name: fields[name] for name in ("where", "expected", "hint")}
    if issubclass(kind, UserBackendError):
        texts["backend"] = str(fields.get("backend", ""))
    return kind(fields["what"], **texts)
