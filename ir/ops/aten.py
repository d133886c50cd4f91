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

    overload    the torch op, which is the target of its calls in a graph
    parameters  its parameters; `x` is torch's `self`
    placement   its placement rule: how arguments and results are distributed over a mesh axis
    view        whether the result shares memory with `x`, so that a call costs nothing
    run         a function that executes a call in a plan; it gets only the first `given` arguments, by position
    """

    overload: torch._ops.OpOverload
    parameters: Parameters
    placement: Rule
    view: bool
    run: Callable[..., Any]
    given: int

    @property
    def name(self) -> str:
        """Return the op's name in the text of programs, such as "aten.add.Tensor"."""
        return f"aten.{self.overload._schema.name.partition('::')[2]}.{self.overload._overloadname}"

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return a call's arguments by parameter name, with defaults filled in. Raises TypeError if they do not fit."""
        return self.parameters.bind(args, kwargs)

    def count(self, args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[torch.Tensor]) -> Cost:
        """Return the flops and bytes of a call: none for a view, else one operation per element of the results.

        Arguments and results may be meta tensors.
        """
        if self.view:
            return Cost()
        return Cost(sum(result.numel() for result in results), bytes_of(*args, *kwargs.values(), *results))


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
    """The placement rule of add: two partial sums over the ranks add to a partial sum.

    Otherwise the rule is that of elementwise ops: all arguments are split along the same axis, or all are replicated.
    """
    if len(call.types) == 2 and all(call.kind(name) == "partial" for name in call.types):
        return Fit(call.at, call.partial)
    return elementwise(call)


def _product(call: Call) -> Fit:
    """The placement rule of mul: a partial sum over the ranks times a constant is a partial sum.

    Otherwise the rule is that of elementwise ops: all arguments are split along the same axis, or all are replicated.
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
    """The placement rule of slice: along the axis that a mesh splits, only whole parts of a merged tensor can be taken.

    An example is k of merged q, k and v.
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
    """Return the aten op that a graph node with this target calls; None if programs may not call it."""
    return _BY_OVERLOAD.get(target)


def definition_of(target: Any) -> Op | AtenOp | None:
    """Return the op that a graph node with this target calls, Ingot's or aten's; None for `getitem` and regions."""
    return op_of(target) or aten_of(target)
