"""Spans of requests, as a collector receives them: tokens and times, the caller's trace, and no text."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from http_server import HttpServer, until
from starlette.testclient import TestClient
from thread_server import ThreadServer, thread_server

from ingot import AsyncLLM
from ingot.ir.errors import OptionError
from ingot.serve.http.app import make_app
from ingot.serve.http.options import HttpOptions
from ingot.serve.http.tracing import make_provider

pytestmark = pytest.mark.xdist_group("serve")
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """Takes OTLP over HTTP. `paths` are those of its requests, `bodies` their content."""

    def __init__(self) -> None:
        collector = self
        self.paths: list[str] = []
        self.bodies: list[bytes] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                collector.paths.append(self.path)
                collector.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Is silent."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def spans(self) -> list[tuple[str, dict[str, Any], Any]]:
        """The name, the attributes, and all of each span."""
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        found = []
        for body in self.bodies:
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                (name,) = (one.value.string_value for one in resource.resource.attributes if one.key == "service.name")
                assert name == "ingot"
                for span in (span for scope in resource.scope_spans for span in scope.spans):
                    values = {
                        one.key: getattr(one.value, one.value.WhichOneof("value") or "") for one in span.attributes
                    }
                    found.append((span.name, values, span))
        return found

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.sdk", reason="needs ingot[otlp]")
    running = Collector()
    yield running
    running.close()


@pytest.fixture(scope="module")
def traced(
    chat_artifact: Path, tmp_path_factory: pytest.TempPathFactory, collector: Collector, engine_thread: object
) -> Iterator[tuple[ThreadServer, Any]]:
    """A server with keys that sends spans to the collector, and its provider."""
    provider = make_provider(collector.url)
    folder = tmp_path_factory.mktemp("traced")
    with thread_server(chat_artifact, folder, api_keys=("secret",), tracer_provider=provider) as running:
        yield running, provider
    provider.shutdown()


def test_spans_of_requests(traced: tuple[ThreadServer, Any], collector: Collector) -> None:
    server, provider = traced
    key = {"Authorization": "Bearer secret"}
    parent = {**key, "traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "mine"}
    body = {"prompt": ["a text", "another"], "max_tokens": 3, "temperature": 0.5, "ignore_eos": True}
    assert server.http.post("/v1/completions", json={**body, "stream": True}, headers=parent).status_code == 200
    assert server.http.post("/v1/completions", json=body, headers=key).status_code == 200
    assert server.http.post("/v1/completions", json={**body, "n": 0}, headers=key).status_code == 400
    assert server.http.post("/tokenize", json={"prompt": "a text"}, headers=key).status_code == 200
    assert server.http.post("/v1/completions", json=body).status_code == 401
    assert server.http.get("/v1/models", headers=key).status_code == 200
    provider.force_flush()
    until(lambda: len(collector.spans()) == 4, 10)
    (streamed, whole, bad, other) = collector.spans()
    name, values, span = streamed
    assert name == "POST /v1/completions" and values["http.route"] == "/v1/completions"
    assert span.trace_id.hex() == TRACE and span.parent_span_id.hex() == PARENT
    assert values["gen_ai.request.id"] == "mine" and values["gen_ai.response.model"] == "tiny"
    assert values["gen_ai.usage.prompt_tokens"] == 13 and values["gen_ai.usage.completion_tokens"] == 6
    assert values["gen_ai.request.max_tokens"] == 3 and values["gen_ai.request.temperature"] == 0.5
    assert 0 < values["gen_ai.latency.time_to_first_token"] < values["gen_ai.latency.e2e"]
    assert span.end_time_unix_nano - span.start_time_unix_nano >= 1e9 * values["gen_ai.latency.e2e"] * 0.99
    assert whole[1]["gen_ai.usage.completion_tokens"] == 6 and whole[2].parent_span_id == b""
    assert "gen_ai.latency.time_to_first_token" not in whole[1]
    assert bad[1]["http.response.status_code"] == 400 and "gen_ai.response.model" not in bad[1]
    assert bad[2].status.code == 0, "an error of the client"
    assert other[0] == "POST /tokenize"
    assert set(collector.paths) == {"/v1/traces"}
    assert not any(text in body for body in collector.bodies for text in (b"secret", b"a text", b"another"))


def test_a_failed_request_is_a_failed_span(chat_artifact: Path, collector: Collector) -> None:
    provider = make_provider(f"{collector.url}/of/my/collector")
    app, _ = make_app(AsyncLLM(chat_artifact), HttpOptions(("tiny",)), provider)  # its engine has not started
    refused = TestClient(app).post("/v1/completions", json={"prompt": "a"}, headers={"Host": "localhost"})
    assert refused.status_code == 503
    provider.shutdown()
    assert collector.paths[-1] == "/of/my/collector"
    assert collector.spans()[-1][2].status.code == 2


def test_the_name_of_the_service_is_an_operators(monkeypatch: pytest.MonkeyPatch, collector: Collector) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat")
    assert make_provider(collector.url).resource.attributes["service.name"] == "chat"


@pytest.mark.parametrize("endpoint", ["localhost:4317", "grpc://localhost:4317", "", "http:///x", "http://"])
def test_an_endpoint_that_is_no_url(endpoint: str) -> None:
    with pytest.raises(OptionError, match="--otlp-traces-endpoint"):
        make_provider(endpoint)


def test_without_the_sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(OptionError, match=r"ingot\[otlp\]"):
        make_provider("http://127.0.0.1:4318")


@pytest.mark.slow
def test_the_command_sends_the_last_spans_at_its_end(chat_artifact: Path, collector: Collector, tmp_path: Path) -> None:
    before = len(collector.spans())
    server = HttpServer(chat_artifact, tmp_path / "log", "--otlp-traces-endpoint", f"{collector.url}/v1/traces")
    try:
        assert server.complete(max_tokens=1).status_code == 200
        assert server.stop() == 0
    finally:
        server.close()
    assert [name for name, *_ in collector.spans()[before:]] == ["POST /v1/completions"]
