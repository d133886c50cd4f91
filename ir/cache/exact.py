"""KV caches of eight bits in float64: as an interpreter that computes exactly holds them, and as they are compared."""

import torch
from torch import fx

from ingot.ir.cache.dtype import is_narrow
from ingot.ir.cache.form import CacheForm
from ingot.ir.ops import op_of
from ingot.ir.program import Program, held_type, named_arguments
from ingot.ir.types import StateType


def is_narrow_cache(program: Program, state: fx.Node) -> bool:
    """Return whether the placeholder `state` is a KV cache of eight bits."""
    if not isinstance(state.meta["type"], StateType):
        return False
    spec = program.states[str(state.target)]
    return spec.kind == "paged_kv" and is_narrow(spec.type.dtype)


def exact_cache(held: torch.Tensor, state: fx.Node) -> torch.Tensor:
    """Return the numbers of a KV cache of eight bits in float64, in a tensor of the same shape.

    `state` is the placeholder of the cache. If calls that use it have scales per token, keys and values are multiplied
    by them, and all other elements are 0. Otherwise they are the stored numbers, which ops multiply by their scales.
    """
    form = _form(state)
    if form is None:
        return held.double()
    exact = torch.zeros(held.shape, dtype=torch.float64, device=held.device)
    for numbers, scales, into in (
        (form.keys(held), form.key_scales(held), form.keys(exact)),
        (form.values(held), form.value_scales(held), form.values(exact)),
    ):
        into.copy_(numbers.double() * scales.double()[..., None])
    return exact


def comparable_state(program: Program, name: str, held: torch.Tensor) -> torch.Tensor:
    """Return the content `held` of the state `name` as numbers that can be compared.

    A KV cache of eight bits is rounded, so it is compared in float64 (`exact_cache`). A number near a tie may be
    rounded to either side, and the bytes of scales in rows are no elements. Other states are returned unchanged.
    """
    node = next(one for one in program.placeholders("state") if str(one.target) == name)
    narrow = is_narrow(held.dtype) and is_narrow_cache(program, node)
    return exact_cache(held.cpu(), node) if narrow else held


def _form(state: fx.Node) -> CacheForm | None:
    """Return the form of a cache with scales per token, from a call that writes or reads it; None for other caches."""
    for user in state.users:
        if op_of(user.target) is None or not user.kwargs.get("per_token"):
            continue
        call = named_arguments(user)
        if "k" in call:
            v = None if call["v"] is None else held_type(call["v"])
            return CacheForm.of(held_type(call["k"]), v, per_token=True)
        width = held_type(call["q"]).shape[2]
        return CacheForm.of_cache(held_type(state).shape, width, call["value_width"], per_token=True)
    return None
