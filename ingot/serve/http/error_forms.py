"""The form of an error by route: Anthropic's on `/v1/messages`, OpenAI's on all others."""

import msgspec
from starlette.responses import Response
from starlette.types import Scope

from ingot.serve.http.errors import HttpError

_MESSAGES = "/v1/messages"
# Anthropic's error types by status (https://platform.claude.com/docs/en/api/errors). It uses "invalid_request_error"
# for further client errors. A server without its engine is "overloaded_error", as clients then try again.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


class _Error(msgspec.Struct):
    type: str
    message: str


class _ErrorAnswer(msgspec.Struct, tag_field="type", tag="error"):
    error: _Error
    request_id: str | None


def is_messages_path(scope: Scope) -> bool:
    """Return whether a request is for one of the routes in Anthropic's form."""
    path = str(scope["path"]).removeprefix(scope.get("root_path", ""))
    return path == _MESSAGES or path.startswith(f"{_MESSAGES}/")


def error_response(scope: Scope, error: HttpError) -> Response:
    """Return the response for an error of a request, in the form of the request's route."""
    if not is_messages_path(scope):
        return error.response()
    return error.response(messages_error(error, scope.get("state", {}).get("request_id")))


def messages_error(error: HttpError, request_id: str | None) -> bytes:
    """Return an error as JSON in Anthropic's form. `request_id` is the id of the request that failed."""
    kind = _TYPES.get(error.status, "invalid_request_error")
    message, param = error.message, error.param
    if param is not None and not message.startswith(param):
        message = f"{param}: {message}"  # the form has no field for it
    return msgspec.json.encode(_ErrorAnswer(_Error(kind, message), request_id))
