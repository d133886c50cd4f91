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
    """A call of an op, as a placement rule sees it on one mesh axis.

    values  the arguments by parameter name: nodes and constants
    at      for each argument that is a node, its placement on this axis; None: replicated
    types   the types of these arguments on one rank; for a state, the type of its tensor
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
    """The result of a placement rule on one mesh axis: how arguments must be placed, and how results are then.

    `needs` maps parameters to the placements that the op needs; a parameter that it lacks must be replicated. `result`
    is the placement of the result, or a tuple with one for each result. None means replicated.
    """

    needs: Mapping[str, Spot] = field(default_factory=dict)
    result: Spot | tuple[Spot, ...] = None


Rule = Callable[[Call], Fit]


def whole(call: Call) -> Fit:
    """A placement rule: all arguments and results of the call are replicated on the axis."""
    return Fit()


def elementwise(call: Call) -> Fit:
    """A placement rule for elementwise ops: split all arguments along the same dim, or replicate all.

    Dims are counted from the last, as in broadcasting.
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
    """Return the placements of an attention op: split by heads if one argument already is, else all replicated.

    `dims` maps parameters to their axis of heads. `result` is the placement of the results if they are split.
    """
    given = {name: dim for name, dim in dims.items() if name in call.types}
    if not any(call.is_shard(name, dim) for name, dim in given.items()):
        return whole(call)
    return Fit({name: call.shard(dim) for name, dim in given.items()}, result)


def viewed_dim(shape: tuple[Size, ...], viewed: tuple[Size, ...], dim: int) -> int | None:
    """Return the axis along which a view is sharded, if the viewed tensor is sharded along `dim`.

    `shape` is the tensor's shape, `viewed` that of the view. Example: a view of [T, 64] as [T, 8, 8] that is sharded
    along axis 1 stays sharded along axis 1. None if no axis of the view holds the shard: an axis that is joined with
    others must be the outermost of them.
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
