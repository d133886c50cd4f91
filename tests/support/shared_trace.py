"""Traces of requests for a process: what is traced alike is traced once, for that takes most of the time."""

from ingot.ir.program import Model
from ingot.request import Request

_TRACED: dict[str, Model] = {}


def shared_trace(request: Request) -> Model:
    stored = {name: info.dtype for name, info in request.checkpoint.tensors.items()}
    key = f"{request.spec} {request.limits} {stored}"
    if key not in _TRACED:
        _TRACED[key] = request.trace()
    return _TRACED[key]
