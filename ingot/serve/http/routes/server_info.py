"""`/server_info`: what this server runs, for reports of faults. It has no paths, keys or requests."""

import platform
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ingot.serve.engine.client import EngineClient
from ingot.serve.http.answers import json_response
from ingot.serve.http.serving import Serving, serving_of

router = APIRouter()


@router.get("/server_info")
async def server_info(request: Request) -> Response:
    """Return versions, the artifact's facts, the engine's state and the limits of the server."""
    serving = serving_of(request)
    answer = {
        "versions": {"ingot": version("ingot"), "python": platform.python_version()},
        "model": _model(serving),
        "engine": _engine(serving),
        "server": _server(serving),
    }
    return json_response(answer)


def _model(serving: Serving) -> dict[str, Any]:
    model = serving.llm.model
    facts = {f"artifact_{part}" if part != "model" else "facts": value for part, value in model.facts.items()}
    return {"name": model.name, "served_names": serving.options.model_names, **facts}


def _engine(serving: Serving) -> dict[str, Any]:
    engine = serving.llm.engine
    vectors = engine.vectors
    task = "generate" if vectors is None else "classify" if vectors.classes else "embed"
    return {
        "state": engine.state,
        "paused": engine.paused,
        "restarts": sum(one.restarts for one in engine.engines),
        "start_seconds": engine.engines[0].timings,
        "max_num_seqs": engine.max_num_seqs,
        "task": task,
        "vector_size": None if vectors is None else vectors.width,
        "replicas": [_replica(one) for one in engine.engines],
        "options": {name: value for name, value in engine.options.items() if value is not None},
    }


def _replica(engine: EngineClient) -> dict[str, Any]:
    return {
        "state": engine.state,
        "place": engine.place.name,
        "restarts": engine.restarts,
        "start_seconds": engine.timings,
        "unfinished": engine.num_unfinished,
        "running": engine.stats.running,
        "waiting": engine.stats.waiting,
    }


def _server(serving: Serving) -> dict[str, Any]:
    options = serving.options
    return {
        "started": serving.since,
        "needs_key": bool(options.api_keys),
        "strict": options.strict,
        "drain_seconds": options.drain_seconds,
        "read_seconds": options.read_seconds,
        "busy_poll": options.busy_poll,
        "max_body": options.max_body,
        "header_bytes": options.header_bytes,
        "max_waiting": serving.llm.engine.limits.max_waiting,
    }
