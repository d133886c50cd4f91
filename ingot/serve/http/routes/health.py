"""The state of the server: `/health`, `/ready`, `/load`, `/version`, `/metrics`."""

from importlib.metadata import version

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from ingot.serve.http.answers import json_response
from ingot.serve.http.serving import serving_of

router = APIRouter()


@router.get("/health")
async def health(request: Request) -> Response:
    """Answer 200 while the server can serve, or will again: also while the engine starts. Else 503."""
    return Response(
        status_code=200 if serving_of(request).llm.engine.state in ("starting", "ready", "sleeping") else 503
    )


@router.get("/ready")
async def ready(request: Request) -> Response:
    """Answer 200 if a request would be served now, and 503 while the engine starts or the server drains."""
    return Response(status_code=200 if serving_of(request).ready else 503)


@router.get("/load")
async def load(request: Request) -> Response:
    """Return the number of unfinished requests, under vLLM's name, and with several replicas that of each."""
    engine = serving_of(request).llm.engine
    each = [one.num_unfinished for one in engine.engines]
    return json_response({"server_load": sum(each), **({"replicas": each} if len(each) > 1 else {})})


@router.get("/version")
async def show_version() -> Response:
    """Return Ingot's version."""
    return json_response({"version": version("ingot")})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Return the metrics in Prometheus' text form."""
    return Response(serving_of(request).metrics.text(), media_type=CONTENT_TYPE_LATEST)
