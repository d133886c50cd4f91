"""Placement rules: how an op's arguments must be placed on a mesh axis, and how its results are placed then.

Each op is defined with its rule; this module holds the rules that several ops share. A rule handles one axis. On an
axis a value is split (a `Placement` of kind shard), a pending sum (partial), or the same on every rank (None).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ingot.ir.types import Placement, Size, TensorType, ValueType

Spot = Placement | None


@dataclass(frozen=True)
class Call:
    """A call of an op, as a placement rule sees it, on one mesh axis.

    values  the arguments by parameter name: nodes and constants
    at      the placement of each node argument on this axis, by parameter name; None: whole on every rank
    types   the type of each node argument on one rank, by parameter name; for a state, the type of its tensor
    result  the type of the call's result
    axis    the name of the mesh axis
    parts   the number of ranks on the axis
    """

    values: Mapping[str, Any]
    at: Mapping[str, Spot]
    types: Mapping[str, TensorType]
    result: ValueType
    axis: str
    parts: int

    def shard(self, dim: int, segments: tuple[int, ...] = ()) -> Placement:
        return Placement(self.axis, "shard", dim, segments)

    @property
    def partial(self) -> Placement:
        return Placement(self.axis, "partial")

    def kind(self, name: str) -> str:
        spot = self.at.get(name)
        return spot.kind if spot is not None else "replicated"

    def is_shard(self, name: str, dim: int) -> bool:
        return self.at.get(name) == self.shard(dim)

    def size(self, name: str, dim: int) -> Size:
        return self.types[name].shape[dim]


@dataclass(frozen=True)
class Fit:
    """The result of a placement rule on one mesh axis.

    `needs` maps a parameter to the placement that its argument must have. Arguments of other parameters must be
    whole on every rank. `result` is the placement that the result then has, or a tuple of placements for several
    results. A placement None means whole on every rank.
    """

    needs: Mapping[str, Spot] = field(default_factory=dict)
    result: Spot | tuple[Spot, ...] = None


Rule = Callable[[Call], Fit]


def whole(call: Call) -> Fit:
    """A placement rule: every rank of the axis has all arguments and results whole."""
    return Fit()


def elementwise(call: Call) -> Fit:
    """A placement rule for elementwise ops: all arguments are split along one dim, or every rank has all of them whole.

    Dims are counted from the last one, as in broadcasting.
    """
    ranks = {name: len(value_type.shape) for name, value_type in call.types.items()}
    split = {name: spot for name, spot in call.at.items() if spot is not None and spot.kind == "shard"}
    places = {(spot.dim - ranks[name], spot.segments) for name, spot in split.items()}
    if len(places) != 1:
        return whole(call)
    dim, segments = places.pop()
    for name in call.types.keys() - split.keys():
        if ranks[name] >= -dim and call.size(name, dim) != 1:
            return whole(call)  # this argument is whole along the split axis
    return Fit(split, call.shard(max(ranks.values()) + dim, segments))


def by_heads(call: Call, dims: Mapping[str, int], result: Spot | tuple[Spot, ...]) -> Fit:
    """A placement rule for attention ops: if one argument is split by heads, all of them must be.

    If none is, every rank has all arguments and results whole. `dims` maps each parameter to its dim of heads. `result`
    is the placement of the results if they are split. It is a tuple for several results.
    """
    given = {name: dim for name, dim in dims.items() if name in call.types}
    if not any(call.is_shard(name, dim) for name, dim in given.items()):
        return whole(call)
    return Fit({name: call.shard(dim) for name, dim in given.items()}, result)


def viewed_dim(shape: tuple[Size, ...], viewed: tuple[Size, ...], dim: int) -> int | None:
    """Return the dim along which a view is sharded, if the viewed tensor is sharded along `dim`.

    `shape` is the shape of the tensor, `viewed` the shape of the view. Example: if [T, 64] is sharded along dim 1, its
    view [T, 8, 8] is sharded along dim 1. Returns None if the view cannot be sharded. A view that merges `dim` with
    other dims can be sharded only if `dim` is the outermost of them.
    """
    i = j = 0
    while i < len(shape) and j < len(viewed):
        first, left, right = (i, j), shape[i], viewed[j]
        i, j = i + 1, j + 1
        while left != right:
            if isinstance(left, str) or isinstance(right, str):
                return None
            if left < right:
                if i == len(shape) or isinstance(size := shape[i], str):
                    return None
                left, i = left * size, i + 1
            else:
                if j == len(viewed) or isinstance(size := viewed[j], str):
                    return None
                right, j = right * size, j + 1
        if dim < i:
            return first[1] if dim == first[0] else None
    return None
