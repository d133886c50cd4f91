"""OpenTelemetry: a span for each POST request, with the tokens and the times of its generation.

Spans have no text of prompts or outputs, and no keys. Names of attributes are those of OpenTelemetry's conventions for
HTTP and generative AI; `gen_ai.latency.…` and `gen_ai.request.id` are vLLM's (vllm/tracing).
"""

import re
import time
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, Protocol
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ingot.ir.errors import OptionError

_OWN_PATH = "/v1/traces"  # of OTLP over HTTP


class Sampled(Protocol):
    """The parameters of a request, as its span needs them. None: the request has no such parameter."""

    @property
    def n(self) -> int: ...

    @property
    def max_tokens(self) -> int | None: ...

    @property
    def temperature(self) -> float: ...

    @property
    def top_p(self) -> float | None: ...


class Traced(Protocol):
    """The generation of a request, as its span needs it. `first_token_s`: None without a token, or if not streamed."""

    num_tokens: int

    @property
    def params(self) -> Sequence[Sampled]: ...

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def first_token_s(self) -> float | None: ...


# The generations of the request that the present task serves, if it is traced.
_GENERATIONS: ContextVar[list[Traced] | None] = ContextVar("generations", default=None)


def add_to_span(generation: Traced) -> None:
    """Add a generation to the span of the present request, which reads its figures at the end of the request."""
    if (generations := _GENERATIONS.get()) is not None:
        generations.append(generation)


def make_provider(endpoint: str) -> Any:
    """Return OpenTelemetry's TracerProvider that sends spans to `endpoint` by OTLP over HTTP, in batches by a thread.

    The caller calls its `shutdown`, which sends spans that wait. The variables OTEL_SERVICE_NAME,
    OTEL_RESOURCE_ATTRIBUTES and OTEL_EXPORTER_OTLP_HEADERS have their usual meaning. Raises OptionError if the endpoint
    is no URL, or if OpenTelemetry's SDK is not installed.
    """
    if not re.match(r"https?://[^/\s]", endpoint):
        example = "the URL of a collector that takes OTLP over HTTP, as http://127.0.0.1:4318/v1/traces"
        raise OptionError(f"--otlp-traces-endpoint is {endpoint[:200]!r}", expected=example)
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise OptionError(
            f"--otlp-traces-endpoint needs OpenTelemetry's SDK: {error}", hint="pip install 'ingot[otlp]'"
        ) from None
    resource = Resource.create()  # of the environment
    if str(resource.attributes["service.name"]).startswith("unknown_service"):  # the SDK's default
        resource = Resource.create({"service.name": "ingot"})
    provider = TracerProvider(resource=resource)
    where = endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + _OWN_PATH
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=where)))
    return provider


class Tracing:
    """Records a span for each POST request that reaches the app, as a child of the one in its header traceparent."""

    def __init__(self, app: ASGIApp, provider: Any, model_name: str) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._app, self._model_name = app, model_name
        self._tracer = provider.get_tracer("ingot.serve")
        self._extract = TraceContextTextMapPropagator().extract
        self._kind, self._failed = SpanKind.SERVER, Status(StatusCode.ERROR)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        span = self._tracer.start_span("POST", context=self._extract(Headers(scope=scope)), kind=self._kind)
        begin = time.monotonic()
        generations: list[Traced] = []
        token = _GENERATIONS.set(generations)
        status: int | None = None

        async def send_seen(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_seen)
        finally:
            _GENERATIONS.reset(token)
            route = _route_of(scope)
            if route is not None:
                span.update_name(f"POST {route}")
            attributes = {
                "http.request.method": "POST",
                "http.route": route,
                "http.response.status_code": status,
                "gen_ai.request.id": scope["state"]["request_id"],
                **self._figures(generations, time.monotonic() - begin),
            }
            span.set_attributes({name: value for name, value in attributes.items() if value is not None})
            if status is None or status >= 500:
                span.set_status(self._failed)
            span.end()

    def _figures(self, generations: Sequence[Traced], seconds: float) -> dict[str, Any]:
        """Return the attributes of a request's generations; none without any."""
        if not generations:
            return {}
        params = generations[0].params[0]
        firsts = [one.first_token_s for one in generations if one.first_token_s is not None]
        return {
            "gen_ai.response.model": self._model_name,
            "gen_ai.request.n": params.n,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.usage.prompt_tokens": sum(one.num_prompt_tokens for one in generations),
            "gen_ai.usage.completion_tokens": sum(one.num_tokens for one in generations),
            "gen_ai.latency.time_to_first_token": min(firsts, default=None),
            "gen_ai.latency.e2e": seconds,
        }


def _route_of(scope: Scope) -> str | None:
    """Return the route that served a request, as "/v1/completions"; None if none has."""
    if (route := scope.get("route")) is not None:  # a route of FastAPI
        return str(route.path)
    if "endpoint" not in scope or scope.get("path_params"):
        return None
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))  # a route of Starlette, without parameters
