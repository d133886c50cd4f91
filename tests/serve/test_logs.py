"""Logs: lines of JSON for collectors, and a line for each request that shows no secret."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kept_records import kept_records
from starlette.requests import ClientDisconnect
from starlette.testclient import TestClient

from ingot import AsyncLLM
from ingot.serve.http.app import make_app
from ingot.serve.http.options import HttpOptions
from ingot.serve.http.request_log import RequestLog
from ingot.serve.logs import JsonLines

pytestmark = pytest.mark.xdist_group("serve")


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """A record as a collector reads it."""
    line = JsonLines().format(record)
    assert "\n" not in line
    found: dict[str, Any] = json.loads(line)
    return found


def test_a_line_of_json_for_each_request(chat_artifact: Path) -> None:
    options = HttpOptions(("tiny",), api_keys=("secret",), access_log=True)
    app, _ = make_app(AsyncLLM(chat_artifact), options)
    client = TestClient(app)
    headers = {"Authorization": "Bearer secret", "X-Request-Id": "mine"}
    with kept_records("ingot.requests", logging.INFO) as records:
        client.get("/v1/models?token=secret", headers=headers)
        client.get("/v1/models")
        client.get("/a%0Ab%22", headers=headers)
        client.post("/v1/completions", headers=headers, json={"prompt": "secret"})
    found = [fields_of(record) for record in records]
    assert [(one["method"], one["path"], one["status"]) for one in found] == [
        ("GET", "/v1/models", 200),
        ("GET", "/v1/models", 401),
        ("GET", "/a%0Ab%22", 404),
        ("POST", "/v1/completions", 503),
    ]
    assert found[0]["request_id"] == "mine" and found[1]["request_id"] not in ("mine", "-")
    assert all(0 <= one["seconds"] < 10 and one["level"] == "info" and one["client"] for one in found)
    assert not any("secret" in str(one) for one in found)


def test_a_client_that_leaves_before_its_answer() -> None:
    async def fails(*_: object) -> None:
        raise ClientDisconnect

    scope = {"type": "http", "method": "GET", "path": "/x", "http_version": "1.1", "client": None}
    with kept_records("ingot.requests", logging.INFO) as records, pytest.raises(ClientDisconnect):
        asyncio.run(RequestLog(fails)(scope, None, None))  # type: ignore[arg-type]
    (record,) = records
    assert fields_of(record)["status"] == 499 and fields_of(record)["client"] == "-"


def test_errors_and_odd_text_stay_on_one_line() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        record = logging.LogRecord("a", logging.ERROR, "f", 1, "%s", ("x\n\ud800",), sys.exc_info())
    found = fields_of(record)
    assert found["level"] == "error" and "ValueError: two\nlines" in found["error"] and found["message"][0] == "x"


def test_processes_log_in_the_format_of_their_parent() -> None:
    child = "from ingot.serve.logs import set_up_logs; import logging, warnings; set_up_logs(None); "
    child += "logging.getLogger('a').warning('of the child'); warnings.warn('seen')"
    program = f"""
import logging, subprocess, sys
from ingot.serve.logs import set_up_logs
set_up_logs("json")
logging.getLogger("b").info("of the parent")
subprocess.run([sys.executable, "-c", {child!r}], check=True)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [one["message"] for one in lines[:2]] == ["of the parent", "of the child"]
    assert "seen" in lines[2]["message"] and lines[0]["process"] != lines[1]["process"]
    text = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True).stderr
    assert text.splitlines()[0].endswith("WARNING a: of the child")
