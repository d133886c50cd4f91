"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`: LoRA adapters below `--adapter-dir`, under vLLM's names."""

import os
from pathlib import Path
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from ingot.serve.http.body import body_schema, read_fields
from ingot.serve.http.errors import HttpError
from ingot.serve.http.serving import Serving, serving_of

router = APIRouter()
# Names are in answers, in logs and in the labels of metrics.
_MAX_NAME = 200


class LoadFields(msgspec.Struct, kw_only=True):
    """A request to load an adapter. `lora_path` is a folder below `--adapter-dir`, relative to it or absolute."""

    lora_name: str
    lora_path: str
    load_inplace: bool | None = None
    is_3d_lora_weight: bool | None = None


class UnloadFields(msgspec.Struct, kw_only=True):
    """A request to unload an adapter. `lora_int_id` has no effect: names identify adapters."""

    lora_name: str
    lora_int_id: int | None = None


@router.post("/v1/load_lora_adapter", openapi_extra=body_schema(LoadFields))
async def load_adapter(request: Request) -> Response:
    """Load an adapter while requests run, and answer when requests can use it."""
    serving = serving_of(request)
    fields = await read_fields(request, LoadFields, serving.options)
    folder = _below(_adapter_dir(serving), fields.lora_path)
    _refuse(fields)
    if serving.has_model(fields.lora_name):
        raise HttpError(
            400, f"the name `{fields.lora_name[:_MAX_NAME]}` is in use; expected: another name", param="lora_name"
        )
    await serving.llm.load_adapter(fields.lora_name, folder)
    return PlainTextResponse(f"Success: LoRA adapter '{fields.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", openapi_extra=body_schema(UnloadFields))
async def unload_adapter(request: Request) -> Response:
    """Unload an adapter. Requests that use it run to their end."""
    serving = serving_of(request)
    fields = await read_fields(request, UnloadFields, serving.options)
    _adapter_dir(serving)
    if fields.lora_name not in serving.llm.engine.adapters:
        raise HttpError(404, f"there is no adapter `{fields.lora_name[:_MAX_NAME]}`", param="lora_name")
    await serving.llm.unload_adapter(fields.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{fields.lora_name}' removed successfully.")


def _refuse(fields: LoadFields) -> None:
    name = fields.lora_name
    if not 0 < len(name) <= _MAX_NAME or not name.isprintable():
        raise HttpError(
            400, f"lora_name = {name!r:.80}; expected: 1 to {_MAX_NAME} printable characters", param="lora_name"
        )
    used: list[tuple[str, Any]] = [
        (one, value) for one in ("load_inplace", "is_3d_lora_weight") if (value := getattr(fields, one))
    ]
    for one, value in used:
        raise HttpError(400, f"{one} = {value}; expected: false; it is not supported", param=one)


def _adapter_dir(serving: Serving) -> Path:
    folder = serving.options.adapter_dir
    if folder is None:
        raise HttpError(403, "this server loads no adapters on request; it was started without --adapter-dir")
    return folder


def _below(root: Path, given: str) -> Path:
    """Return the folder that a client names. It is below `root`, and no part of its path is a link.

    Raises HttpError 400 for a path that leads elsewhere, 404 for one that is not there.
    """
    refused = HttpError(400, "lora_path is no folder below the server's --adapter-dir", param="lora_path")
    if "\0" in given or len(given) > os.pathconf("/", "PC_PATH_MAX"):
        raise refused
    path = Path(os.path.normpath(root / given))
    if not path.is_relative_to(root) or path == root or ".." in Path(given).parts:
        raise refused
    at = root
    for part in path.relative_to(root).parts:
        at /= part
        try:
            if at.is_symlink():
                raise refused
        except OSError:
            raise refused from None
    if not path.is_dir():
        raise HttpError(404, "there is no such folder below the server's --adapter-dir", param="lora_path")
    return path
