"""Ops that move the contents of a state between steps, along its axis of pages or slots.

No program calls them. The runtime does between steps, for copy-on-write, preemption and rewind. They are ops so that
backends supply kernels for them.
"""

import torch

from ingot.ir.cache.dtype import as_movable
from ingot.ir.ops.registry import Sample, define
from ingot.ir.placements import Call, Fit, whole


def _places(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _copy_samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    state = torch.randn(5, 2, 3, generator=g).to(dtype)
    return [
        Sample((state, _places(0, 1), _places(1, 4)), {"axis": 0}),
        Sample((state, _places(2), _places(0)), {"axis": 2}),
    ]


def _copy(state: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor, *, axis: int) -> None:
    state = as_movable(state)
    state.index_copy_(axis, targets, state.index_select(axis, sources))


def _between_steps(call: Call) -> Fit:
    """The placement rule of ops that copy, move or clear pages or slots of a state.

    The state may be split over the mesh along any axis but the axis of pages or slots. It stays split.
    """
    state = call.at["state"]
    kept = state is None or (state.kind == "shard" and state.dim != call.values["axis"])
    return Fit({"state": state}, state) if kept else whole(call)


@define(
    samples=_copy_samples,
    fake=lambda state, *_, **__: torch.empty_like(state),
    states=("state",),
    in_place=_copy,
    fusible=False,
    flops=0,
    placement=_between_steps,
)
def state_copy(state: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor, *, axis: int) -> torch.Tensor:
    """Copy pages (or slots) of a state: page `sources[i]` to page `targets[i]`. Return the new state.

    `sources` and `targets` are i64[N]. All targets are different. `axis` is the axis of the state that counts pages or
    slots.
    """
    result = state.clone()
    _copy(result, sources, targets, axis=axis)
    return result


def _move(state: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor, *, axis: int) -> None:
    state = as_movable(state)
    moved = state.index_select(axis, sources)
    state.index_fill_(axis, sources, 0)
    state.index_copy_(axis, targets, moved)


@define(
    samples=_copy_samples,
    fake=lambda state, *_, **__: torch.empty_like(state),
    states=("state",),
    in_place=_move,
    fusible=False,
    flops=0,
    placement=_between_steps,
)
def state_move(state: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor, *, axis: int) -> torch.Tensor:
    """Move pages (or slots) of a state: page `sources[i]` to page `targets[i]`. Return the new state.

    `sources` and `targets` are i64[N]. All targets are different. A source that is no target becomes zero. `axis` is
    the axis of the state that counts pages or slots.
    """
    result = state.clone()
    _move(result, sources, targets, axis=axis)
    return result


def _zero_samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    state = torch.randn(5, 2, 3, generator=g).to(dtype)
    return [Sample((state, _places(3, 0)), {"axis": 0}), Sample((state, _places(1)), {"axis": 1})]


def _zero(state: torch.Tensor, targets: torch.Tensor, *, axis: int) -> None:
    as_movable(state).index_fill_(axis, targets, 0)


@define(
    samples=_zero_samples,
    fake=lambda state, *_, **__: torch.empty_like(state),
    states=("state",),
    in_place=_zero,
    fusible=False,
    flops=0,
    placement=_between_steps,
)
def state_zero(state: torch.Tensor, targets: torch.Tensor, *, axis: int) -> torch.Tensor:
    """Set pages (or slots) of a state to zero, and return the new state. `targets` i64[N] lists them.

    `axis` is the axis of the state that counts pages or slots.
    """
    result = state.clone()
    _zero(result, targets, axis=axis)
    return result
