"""The first layer of the server: request ids, API keys, and requests of web pages."""

import hmac
import re
import secrets
from hashlib import sha256

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ingot.serve.http.browser import browser_error
from ingot.serve.http.error_forms import error_response, is_messages_path
from ingot.serve.http.errors import HttpError
from ingot.serve.http.options import HttpOptions
from ingot.serve.http.routes.page import page_files

# Probes of a cluster have no key. These two answer a status and no data.
_PROBES = ("/health", "/ready")
# Ids go into headers, logs and answers: no spaces, no control characters, and not long.
_REQUEST_ID = re.compile(r"[!-~]{1,128}", re.ASCII)


class Guard:
    """Adds an id to each request, and refuses requests without one of the keys, on all paths but those of probes and
    of the page's own files. It also refuses requests that web pages cause (`browser_error`).

    A client's own X-Request-Id is kept. All answers have the header X-Request-Id. A key comes in the header
    Authorization, or else in x-api-key, as Anthropic's clients send it. Without keys in the options, none is needed.
    """

    def __init__(self, app: ASGIApp, options: HttpOptions) -> None:
        self._app, self._options = app, options
        self._digests = [sha256(key.encode()).digest() for key in options.api_keys]
        self._open_paths = {*_PROBES, *(page_files() if options.ui else ())}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
        state = scope.setdefault("state", {})
        state["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                answered = MutableHeaders(scope=message)
                answered["X-Request-Id"] = request_id
                if is_messages_path(scope):
                    answered["Request-Id"] = request_id  # the name that Anthropic's clients read
                answered["X-Content-Type-Options"] = "nosniff"  # no browser takes a model's text for a page
            await send(message)

        error = browser_error(headers, self._options)
        if error is None:
            state["tenant"], error = self._tenant(scope["path"], headers)
        if error is not None:
            await error_response(scope, error)(scope, receive, send_with_id)
            return
        await self._app(scope, receive, send_with_id)

    def _tenant(self, path: str, headers: Headers) -> tuple[str, HttpError | None]:
        """Return a name for the owner of a request's key, "" if no key is needed; or the error for a request without a
        valid key. The name is a digest, so that the key itself goes no further."""
        if not self._digests or path.removeprefix(self._options.root_path) in self._open_paths:
            return "", None
        kind, _, key = headers.get("authorization", "").partition(" ")
        if not kind and (given := headers.get("x-api-key")) is not None:
            kind, key = "bearer", given
        digest = sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        # The time does not depend on which key agrees, or on how much of it.
        known = any([hmac.compare_digest(digest, one) for one in self._digests])
        if kind.lower() == "bearer" and known:
            return digest.hex(), None
        message = "Incorrect API key provided." if key else "No API key provided."
        return "", HttpError(
            401, f"{message} Send it as `Authorization: Bearer KEY`, or `x-api-key: KEY`.", code="invalid_api_key"
        )
