"""Requests of web pages: only allowed origins, and no name of elsewhere for a server on the loopback address."""

from __future__ import annotations

from pathlib import Path

import pytest
from http_server import HttpServer
from starlette.datastructures import Headers
from thread_server import thread_server

from ingot.serve.http.browser import browser_error
from ingot.serve.http.options import HttpOptions

pytestmark = pytest.mark.xdist_group("serve")
EVIL = "http://evil.example"


@pytest.mark.parametrize(
    ("headers", "options", "refused"),
    [
        ({"host": "127.0.0.1:8000"}, {}, ""),
        ({"host": "localhost"}, {}, ""),
        ({"host": "[::1]:8000"}, {}, ""),
        ({}, {}, ""),
        ({"host": "evil.example:8000"}, {}, "host"),
        ({"host": "evil.example:8000", "origin": "http://evil.example:8000"}, {}, "host"),
        ({"host": "127.0.0.1.evil.example"}, {}, "host"),
        ({"host": "proxy.example"}, {"allowed_hosts": ("proxy.example",)}, ""),
        ({"host": "any.example"}, {"api_keys": ("key",)}, ""),
        ({"host": "any.example"}, {"host": "0.0.0.0"}, ""),
        ({"host": "any.example"}, {"uds": Path("socket")}, ""),
        ({"host": "localhost:8000", "origin": "http://localhost:8000"}, {}, ""),
        ({"host": "localhost:8000", "origin": EVIL}, {}, "origin"),
        ({"host": "localhost:8000", "origin": "null"}, {}, "origin"),
        ({"host": "localhost:8000", "origin": EVIL}, {"api_keys": ("key",)}, "origin"),
        ({"host": "localhost:8000", "origin": EVIL}, {"allowed_origins": (EVIL,)}, ""),
        ({"host": "localhost:8000", "origin": EVIL + ".example"}, {"allowed_origins": (EVIL,)}, "origin"),
        ({"host": "localhost:8000", "origin": EVIL}, {"allowed_origins": ("*",)}, ""),
    ],
)
def test_which_requests_are_refused(headers: dict[str, str], options: dict[str, object], refused: str) -> None:
    error = browser_error(Headers(headers), HttpOptions(("tiny",), **options))  # type: ignore[arg-type]
    assert (error is not None) == bool(refused)
    if error is not None:
        assert error.status == 403 and f"the {refused} " in error.message


def test_a_page_of_elsewhere_is_refused(server: HttpServer) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    for headers in ({"Origin": EVIL}, {"Host": "evil.example"}):
        refused = server.http.post("/v1/completions", json=body, headers=headers)
        assert refused.status_code == 403 and refused.json()["error"]["type"] == "permission_error"
        assert "access-control-allow-origin" not in refused.headers


@pytest.mark.usefixtures("engine_thread")
def test_an_allowed_page(chat_artifact: Path, tmp_path: Path) -> None:
    allowed = "https://chat.example"
    with thread_server(chat_artifact, tmp_path, allowed_origins=(allowed,), api_keys=("key",)) as server:
        asks = {"Origin": allowed, "Access-Control-Request-Headers": "authorization,content-type,x-api-key"}
        for method, path in (("POST", "/v1/completions"), ("DELETE", "/v1/responses/resp_1")):
            answer = server.http.options(path, headers={**asks, "Access-Control-Request-Method": method})
            assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == allowed
        headers = {"Origin": allowed, "Authorization": "Bearer key"}
        made = server.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=headers)
        assert made.status_code == 200 and made.headers["access-control-allow-origin"] == allowed
        assert server.http.get("/v1/models", headers={**headers, "Origin": EVIL}).status_code == 403
        assert server.http.get("/v1/models", headers={"Origin": allowed}).status_code == 401
