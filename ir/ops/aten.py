"""The ops of aten that programs may call: views and elementwise arithmetic.

`ATEN` holds them by the name in a program's text.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ingot.ir.ops.parameters import Parameters
from ingot.ir.ops.registry import Cost, Op, bytes_of, op_of
from ingot.ir.placements import Call, Fit, Rule, elementwise, viewed_dim, whole
from ingot.ir.types import TensorType


@dataclass(frozen=True)
class AtenOp:
    """An aten op that programs may call.

    overload    the torch op, as the target of graph nodes
    parameters  its parameters; torch's `self` is named `x`
    placement   its placement rule: how arguments and results are distributed over a mesh axis
    view        whether the result shares memory with `x`; a call then costs nothing
    run         the function that the runtime calls for it
    given       the number of arguments that `run` takes; it gets the first ones by position
    """

    overload: torch._ops.OpOverload
    parameters: Parameters
    placement: Rule
    view: bool
    run: Callable[..., Any]
    given: int

    @property
    def name(self) -> str:
        """Return the op's name in a program's text, such as "aten.add.Tensor"."""
        return f"aten.{self.overload._schema.name.partition('::')[2]}.{self.overload._overloadname}"

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return a call's arguments by parameter name, with defaults filled in.

        Raises TypeError if the arguments do not fit the parameters.
        """
        return self.parameters.bind(args, kwargs)

    def count(self, args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[torch.Tensor]) -> Cost:
        """Return the flops and bytes of a call: none for a view, else one flop per element of the results.

        Arguments and results may be meta tensors.
        """
        if self.view:
            return Cost()
        moved = sum(self.moved(args, kwargs).values())
        return Cost(sum(result.numel() for result in results), moved + bytes_of(*results))

    def moved(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, int]:
        """Return the bytes of each argument, by parameter name. Calls that use a view may read all of it."""
        return {name: bytes_of(value) for name, value in self.bind(args, kwargs).items()}


def _parameters(overload: torch._ops.OpOverload) -> Parameters:
    found = overload._schema.arguments
    names = ["x" if one.name == "self" else one.name for one in found]
    return Parameters(
        names=tuple(names),
        positional=sum(not one.kwarg_only for one in found),
        defaults={name: one.default_value for name, one in zip(names, found, strict=True) if one.has_default_value()},
    )


def _op(
    overload: torch._ops.OpOverload,
    run: Callable[..., Any],
    placement: Rule,
    *,
    view: bool = False,
    given: int = 2,
) -> AtenOp:
    return AtenOp(overload, _parameters(overload), placement, view, run, given)


def _run_slice(x: torch.Tensor, dim: int, begin: int, end: int) -> torch.Tensor:
    return x[(slice(None),) * dim + (slice(begin, end),)]


def _sum(call: Call) -> Fit:
    """The placement rule of add on a mesh axis: the sum of two partial sums is a partial sum.

    Other arguments follow the rule of elementwise ops: all are split along one dim, or every rank has all of them
    whole.
    """
    if len(call.types) == 2 and all(call.kind(name) == "partial" for name in call.types):
        return Fit(call.at, call.partial)
    return elementwise(call)


def _product(call: Call) -> Fit:
    """The placement rule of mul on a mesh axis: a partial sum times a constant is a partial sum.

    Other arguments follow the rule of elementwise ops: all are split along one dim, or every rank has all of them
    whole.
    """
    if len(call.types) == 1 and all(call.kind(name) == "partial" for name in call.types):
        return Fit(call.at, call.partial)
    return elementwise(call)


def _view(call: Call) -> Fit:
    x = call.at["x"]
    if x is None or x.kind == "partial":
        return Fit({"x": x}, x)
    assert isinstance(call.result, TensorType)
    found = viewed_dim(call.types["x"].shape, call.result.shape, x.dim)
    if found is None or (x.segments and call.size("x", x.dim) != call.result.shape[found]):
        return whole(call)
    return Fit({"x": x}, call.shard(found, x.segments))


def _slice(call: Call) -> Fit:
    """The placement rule of slice on a mesh axis.

    A slice along a split dim may take only whole parts of a merged tensor, such as k of merged q, k and v. Otherwise
    every rank must have the tensor whole. A slice along another dim keeps the split.
    """
    x, values = call.at["x"], call.values
    if x is None or x.kind == "partial" or x.dim != values["dim"]:
        return Fit({"x": x}, x)
    bounds = [0]
    for segment in x.segments:
        bounds.append(bounds[-1] + segment // call.parts)
    if values["step"] != 1 or values["start"] not in bounds or values["end"] not in bounds:
        return whole(call)
    kept = x.segments[bounds.index(values["start"]) : bounds.index(values["end"])]
    return Fit({"x": x}, call.shard(x.dim, kept if len(kept) > 1 else ()))


def _permute(call: Call) -> Fit:
    x = call.at["x"]
    if x is None or x.kind == "partial":
        return Fit({"x": x}, x)
    axes = len(call.types["x"].shape)
    return Fit({"x": x}, call.shard([dim % axes for dim in call.values["dims"]].index(x.dim), x.segments))


_aten = torch.ops.aten
ATEN: Mapping[str, AtenOp] = {
    op.name: op
    for op in (
        _op(_aten.add.Tensor, torch.add, _sum),
        _op(_aten.mul.Tensor, torch.mul, _product),
        _op(_aten.view.default, lambda x, shape: x.view(shape), _view, view=True),
        _op(_aten.slice.Tensor, _run_slice, _slice, view=True, given=4),
        _op(_aten.permute.default, lambda x, dims: x.permute(dims), _permute, view=True),
    )
}
_BY_OVERLOAD: Mapping[Any, AtenOp] = {op.overload: op for op in ATEN.values()}


def aten_of(target: Any) -> AtenOp | None:
    """Return the aten op that a graph node with this target calls; None if it is no aten op that programs may call."""
    return _BY_OVERLOAD.get(target)


def definition_of(target: Any) -> Op | AtenOp | None:
    """Return the op that a graph node with this target calls, from Ingot or aten; None for `getitem` and regions."""
    return op_of(target) or aten_of(target)
