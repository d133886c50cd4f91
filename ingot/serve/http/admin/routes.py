"""The operators' routes, in vLLM's form: arguments are in the query, as in `/sleep?level=2`."""

from typing import cast

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ingot.serve.engine.operator import MODES, Mode, Operator
from ingot.serve.http.answers import json_response
from ingot.serve.http.errors import HttpError, checked

router = APIRouter()
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
_WAKE_TAGS = {"weights", "kv_cache"}  # vLLM's parts of an engine that can wake alone


@router.post("/pause")
async def pause(request: Request) -> Response:
    """Run no further steps until `/resume`. `mode` is abort (default), wait or keep; `clear_cache` true (default)."""
    _check_names(request, "mode", "clear_cache", "wait_for_inflight_requests")
    mode = _mode(request)
    if _boolean(request, "wait_for_inflight_requests", default=False):
        mode = "wait"
    await _operator(request).pause(mode, clear_cache=_boolean(request, "clear_cache", default=True))
    return json_response({"status": "paused"})


@router.post("/resume")
async def resume(request: Request) -> Response:
    """Go on after `/pause`."""
    _check_names(request)
    await _operator(request).resume()
    return json_response({"status": "resumed"})


@router.get("/is_paused")
async def is_paused(request: Request) -> Response:
    """Return whether the engine is paused."""
    return json_response({"is_paused": _operator(request).paused})


@router.post("/sleep")
async def sleep(request: Request) -> Response:
    """Free the memory of the engine until `/wake_up`. `level` is 1 (default) or 2, `mode` abort (default) or wait."""
    _check_names(request, "level", "mode")
    level, mode = request.query_params.get("level", "1"), _mode(request)
    reason = "1 or 2; level 0 is /pause?mode=keep"
    checked(400, "level", level, level in ("1", "2"), reason)
    if mode == "keep":
        raise HttpError(
            400,
            "mode = keep; expected: abort or wait. Sleep discards the KV cache, and with it all running requests. To"
            " keep them, their pages would have to be copied to the host first",
            param="mode",
        )
    await _operator(request).sleep(int(level), mode)
    return json_response({"status": "sleeping", "level": int(level)})


@router.post("/wake_up")
async def wake_up(request: Request) -> Response:
    """Load the engine again after `/sleep`, and answer when it is ready."""
    _check_names(request, "tags")
    tags = set(request.query_params.getlist("tags"))
    if tags and tags != _WAKE_TAGS:
        raise HttpError(
            400,
            f"tags = {', '.join(sorted(tags))[:80]}; expected: none, or weights and kv_cache together. The engine loads"
            " both when its process starts; parts would need an engine that frees and maps them one by one",
            param="tags",
        )
    await _operator(request).wake()
    return json_response({"status": "ready"})


@router.get("/is_sleeping")
async def is_sleeping(request: Request) -> Response:
    """Return whether the engine sleeps."""
    return json_response({"is_sleeping": _operator(request).sleeping})


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> Response:
    """Empty the prefix cache. While requests run, answer 409, or end them with `reset_running_requests`=true."""
    _check_names(request, "reset_running_requests", "reset_external")
    external = _boolean(request, "reset_external", default=False)
    checked(400, "reset_external", external, not external, "false; there is no prefix cache outside the engine")
    aborts = _boolean(request, "reset_running_requests", default=False)
    if not await _operator(request).reset_prefix_cache(aborts=aborts):
        message = "requests run, and hold pages of the cache; pause first, or send reset_running_requests=true"
        raise HttpError(409, message, code="requests_run")
    return json_response({"status": "reset"})


@router.post("/reset_mm_cache")
@router.post("/reset_encoder_cache")
async def refuse_media_cache() -> Response:
    """Refuse: models take text only, so there is no such cache."""
    raise HttpError(
        400, "there is no cache of images or sounds: models take text only. Only /reset_prefix_cache exists"
    )


@router.post("/start_profile")
async def start_profile(request: Request) -> Response:
    """Begin to record what the engine process runs, with PyTorch's profiler."""
    _check_names(request)
    await _operator(request).start_profile()
    return json_response({"status": "recording"})


@router.post("/stop_profile")
async def stop_profile(request: Request) -> Response:
    """End the recording, and return the path of its file, in Chrome's trace format. Each replica has a file."""
    _check_names(request)
    paths = [str(path) for path in await _operator(request).stop_profile()]
    return json_response({"status": "written", "path": paths[0], "paths": paths})


def _operator(request: Request) -> Operator:
    operator = request.app.state.operator
    assert isinstance(operator, Operator)
    return operator


def _mode(request: Request) -> Mode:
    mode = request.query_params.get("mode", "abort")
    checked(400, "mode", mode, mode in MODES, ", ".join(MODES))
    return cast(Mode, mode)


def _boolean(request: Request, name: str, *, default: bool) -> bool:
    text = request.query_params.get(name)
    if text is None:
        return default
    checked(400, name, text, text.lower() in _BOOLEANS, "true or false")
    return _BOOLEANS[text.lower()]


def _check_names(request: Request, *known: str) -> None:
    """Raise HttpError for an argument in the query that is not one of `known`. An operator's typing error must not
    change what the order does."""
    for name in request.query_params:
        wanted = ", ".join(known) or "no arguments"
        checked(400, name[:80], request.query_params[name], name in known, wanted)
