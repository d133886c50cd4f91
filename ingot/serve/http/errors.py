"""Errors of the HTTP server in OpenAI's form: `{"error": {"message": …, "type": …, "param": …, "code": …}}`."""

from http import HTTPStatus
from typing import Any

import msgspec
from starlette.responses import Response

from ingot.ir.errors import AdapterError, EngineDeadError, IngotError, QueueFullError, RequestError
from ingot.runtime.grammar.params import OWNER as STRUCTURED_OUTPUTS

# Seconds after which a client may try again: a queue of 4096 short answers, or a restart of the engine, takes longer
# than one; clients back off by themselves.
RETRY_AFTER_S = 1

# OpenAI's `type` for each status that this server returns; "invalid_request_error" for the others below 500.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable",
}


class HttpError(Exception):
    """An answer that is an error. `param` names the field of the request at fault, `code` is OpenAI's code."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def body(self) -> bytes:
        """Return the error as JSON."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return msgspec.json.encode(
            {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}
        )

    def response(self, body: bytes | None = None) -> Response:
        """Return the HTTP response. `body` replaces the error in OpenAI's form."""
        headers: dict[str, str] = {}
        if self.status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
            headers["Retry-After"] = str(RETRY_AFTER_S)
        if self.status == HTTPStatus.UNAUTHORIZED:
            headers["WWW-Authenticate"] = "Bearer"
        return Response(self.body if body is None else body, self.status, headers, media_type="application/json")


def http_error(error: Exception) -> HttpError:
    """Return the answer for an error of the engine or of the request's checks."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, QueueFullError):
        return HttpError(429, _line(error), code="queue_full")
    if isinstance(error, EngineDeadError):
        return HttpError(503, _line(error), code="engine_unavailable")
    if isinstance(error, RequestError):
        return HttpError(400, _line(error), param=_param(error.where))
    if isinstance(error, AdapterError):  # its `where` is a path of this machine
        return HttpError(400, _line(error), code="adapter_refused")
    if isinstance(error, IngotError):
        return HttpError(500, _line(error))
    return HttpError(500, "internal error; the server's log has the details")


def _line(error: IngotError) -> str:
    """Return an error's text as one line."""
    parts = [error.what]
    if error.expected:
        parts.append(f"expected: {error.expected}")
    if error.hint:
        parts.append(f"to do: {error.hint}")
    return "; ".join(parts)


def _param(where: str) -> str | None:
    """Return the field that an error's `where` names: "temperature" of "SamplingParams.temperature". None if `where`
    is no field. The fields of a grammar are those of "structured_outputs"."""
    if where.startswith(STRUCTURED_OUTPUTS):
        return "structured_outputs"
    name = where.removeprefix("SamplingParams.").removeprefix("BeamSearchParams.")
    return name if name and " " not in name and "/" not in name else None


def checked(status: int, name: str, value: Any, good: bool, expected: str) -> None:
    """Raise HttpError with `status` for the field `name` of a request, unless `good`. The message has the field's
    `value` and what was `expected`."""
    if not good:
        raise HttpError(status, f"{name} = {value!r:.80}; expected: {expected}", param=name)


def check_priority(priority: int) -> None:
    """Raise HttpError 400 for a priority that does not fit into messages to the engine, whose integers have 64 bits."""
    checked(400, "priority", priority, abs(priority) < 1 << 63, "an integer of 64 bits")
