"""The application: the routes, the guard, and the form of all errors."""

import logging
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from ingot.ir.errors import IngotError
from ingot.serve.async_llm import AsyncLLM
from ingot.serve.http.error_forms import error_response
from ingot.serve.http.errors import HttpError, http_error
from ingot.serve.http.guard import Guard
from ingot.serve.http.metrics import Metrics
from ingot.serve.http.options import HttpOptions
from ingot.serve.http.request_log import RequestLog
from ingot.serve.http.routes import (
    adapters,
    chat,
    classify,
    completions,
    embeddings,
    health,
    messages,
    models,
    page,
    responses,
    scores,
    server_info,
    tokens,
)
from ingot.serve.http.serving import Serving
from ingot.serve.http.tracing import Tracing

log = logging.getLogger("ingot.serve")


_ROUTES = (
    *(adapters, chat, classify, completions, embeddings, health, messages, models, responses, scores, server_info),
    tokens,
)


def make_app(llm: AsyncLLM, options: HttpOptions, tracer_provider: Any = None) -> tuple[ASGIApp, Serving]:
    """Return the application that serves a model, and the state of its routes. The caller starts and closes `llm`.

    tracer_provider   OpenTelemetry's provider for the spans of requests; None: there are no spans
    """
    # No pages of documentation: they load scripts from elsewhere.
    app = FastAPI(title="Ingot", docs_url=None, redoc_url=None)
    serving = Serving(llm, options, Metrics(llm.engine, options.model_names[0], llm.model.page_size))
    app.state.serving = serving
    for routes in _ROUTES:
        # FastAPI's routes describe the bodies in /openapi.json. At each request they would look for dependencies, which
        # none of these has; that takes 0.2 ms. So routes of Starlette come first.
        app.router.routes += [
            Route(route.path, route.endpoint, methods=["POST"])
            for route in routes.router.routes
            if isinstance(route, APIRoute) and route.methods == {"POST"}
        ]
    for routes in _ROUTES:
        app.include_router(routes.router)
    if options.ui:
        app.include_router(page.router)
    add_error_handlers(app)
    # Inside the guard: a request without a key cannot fill the collector.
    traced = app if tracer_provider is None else Tracing(app, tracer_provider, options.model_names[0])
    guarded: ASGIApp = Guard(traced, options)
    if options.allowed_origins:
        # Before the guard: a browser first asks without a key whether its page may send a request.
        guarded = CORSMiddleware(
            guarded,
            allow_origins=options.allowed_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=("X-Request-Id",),
        )
    if options.access_log:
        guarded = RequestLog(guarded)
    return guarded, serving


def add_error_handlers(app: FastAPI) -> None:
    """Let an application answer all errors in OpenAI's form."""
    app.add_exception_handler(HttpError, _answer)
    app.add_exception_handler(IngotError, _answer)
    app.add_exception_handler(HTTPException, _answer_framework)
    app.add_exception_handler(Exception, _answer)


async def _answer(request: Request, error: Exception) -> Response:
    answer = http_error(error)
    if answer.status == 500 and isinstance(error, IngotError):  # others are logged with their traceback
        log.error("a request failed: %s", error)
    return error_response(request.scope, answer)


async def _answer_framework(request: Request, error: Exception) -> Response:
    """Answer an error of the framework: an unknown path, or a method that the path does not have."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    messages = {404: f"there is no route {path[:200]}", 405: f"{path[:200]} does not take {request.method}"}
    refused = HttpError(error.status_code, messages.get(error.status_code, str(error.detail)))
    answer = error_response(request.scope, refused)
    for name, value in (error.headers or {}).items():
        answer.headers[name] = value
    return answer
