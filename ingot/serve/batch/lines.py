"""The lines of batch files: requests, and their answers."""

import secrets
from collections.abc import Iterator
from typing import Any, BinaryIO

import msgspec

# OpenAI's limit on a request in a batch file is lower; this is the server's limit on a body (`HttpOptions.max_body`),
# and room for the line's other fields.
MAX_LINE_BYTES = (16 << 20) + (64 << 10)
_DECODER = msgspec.json.Decoder()


class BatchRequest(msgspec.Struct):
    """A request of a batch file.

    custom_id   names the request in the answers; unique in the file
    url         the path of a route, as in "/v1/completions"
    body        the JSON object that the route takes
    """

    custom_id: str
    url: str
    body: dict[str, Any]


class LineError(Exception):
    """A line that is no request. `custom_id` is the line's own, or None if it has none."""

    def __init__(self, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.custom_id = custom_id


class RouteAnswer(msgspec.Struct):
    """The answer to a request: its HTTP status, and the JSON that the route returned, which may be an error."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class ErrorText(msgspec.Struct):
    """Why a line got no answer."""

    code: str
    message: str


class AnswerLine(msgspec.Struct):
    """A line of the output: an answer, or an error for a line that is no request."""

    id: str
    custom_id: str | None
    response: RouteAnswer | None
    error: ErrorText | None


def read_lines(file: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """Yield the number, from 1 on, and the content of each line that is not blank. The content is None if the line is
    longer than MAX_LINE_BYTES."""
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
            while line and not line.endswith(b"\n"):  # the rest of it
                line = file.readline(MAX_LINE_BYTES)
            yield number, None
        elif line.strip():
            yield number, line


def read_request(line: bytes | None) -> BatchRequest:
    """Return the request of a line, as `read_lines` yields it. Raises LineError."""
    if line is None:
        raise LineError(f"the line is longer than {MAX_LINE_BYTES} bytes")
    try:
        fields = _DECODER.decode(line)
    except (ValueError, RecursionError) as error:  # msgspec.DecodeError, UnicodeDecodeError, too deep
        raise LineError(f"the line is no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise LineError(f"the line is a JSON {type(fields).__name__}; expected: an object")
    custom_id = fields.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise LineError(f"custom_id = {custom_id!r:.80}; expected: a text")
    method, url, body = fields.get("method"), fields.get("url"), fields.get("body")
    if method != "POST":
        raise LineError(f"method = {method!r:.80}; expected: POST", custom_id)
    # Nothing is sent anywhere: the path only selects a route of this program.
    if not isinstance(url, str) or not url.startswith("/") or not url.isascii() or set(url) & set("?#\\ "):
        raise LineError(f"url = {url!r:.80}; expected: the path of a route, as in /v1/completions", custom_id)
    if not isinstance(body, dict):
        raise LineError(f"body is a {type(body).__name__}; expected: an object", custom_id)
    if body.get("stream"):
        raise LineError("stream in a batch; expected: false, or none", custom_id)
    return BatchRequest(custom_id, url, body)


def answer_line(custom_id: str, answer: RouteAnswer) -> AnswerLine:
    """Return the line of an answer."""
    return AnswerLine(_line_id(), custom_id, answer, None)


def error_line(number: int, error: LineError) -> AnswerLine:
    """Return the line for an input line that is no request. `number` is the input line's."""
    return AnswerLine(_line_id(), error.custom_id, None, ErrorText("invalid_request", f"line {number}: {error}"))


def _line_id() -> str:
    return f"batch_req_{secrets.token_hex(12)}"
