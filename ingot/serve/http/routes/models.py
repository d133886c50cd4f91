"""`/v1/models`: the served model under each of its names, and the LoRA adapters."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ingot.serve.http.answers import json_response
from ingot.serve.http.serving import Serving, serving_of

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """List the names of the model."""
    serving = serving_of(request)
    data = [_card(serving, name) for name in (*serving.options.model_names, *serving.llm.engine.adapters)]
    return json_response({"object": "list", "data": data})


@router.get("/v1/models/{name:path}")
async def read_model(request: Request, name: str) -> Response:
    """Describe the model, or answer 404 for a name that it does not have."""
    serving = serving_of(request)
    return json_response(_card(serving, serving.model_name(name)))


def _card(serving: Serving, name: str) -> dict[str, Any]:
    model = serving.llm.model
    return {
        "id": name,
        "object": "model",
        "created": serving.since,
        "owned_by": "ingot",
        "root": serving.adapter_of(name) or model.name,
        "parent": serving.options.model_names[0] if serving.adapter_of(name) else None,
        "max_model_len": model.max_seq_len,
        "has_chat_template": model.has_chat_template,
    }
