"""The ops of aten that programs may call: views and elementwise arithmetic. `ATEN` holds them by printed name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ingot.ir.ops.parameters import Parameters


@dataclass(frozen=True)
class AtenOp:
    """One op of aten that the dialect takes over.

    `overload` stands in a graph as the target of a call. `parameters` are named as the dialect names them: `x` is what
    torch calls `self`. The result of a `view` shares memory with `x`. `run` computes an instruction of a plan, which
    gives the first `given` arguments by position and no other.
    """

    overload: torch._ops.OpOverload
    parameters: Parameters
    view: bool
    run: Callable[..., Any]
    given: int

    @property
    def name(self) -> str:
        """The printed name."""
        return f"aten.{self.overload._schema.name.partition('::')[2]}.{self.overload._overloadname}"

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments by parameter, defaults filled in. Raises TypeError for a call that does not fit."""
        return self.parameters.bind(args, kwargs)


def _parameters(overload: torch._ops.OpOverload) -> Parameters:
    found = overload._schema.arguments
    names = ["x" if one.name == "self" else one.name for one in found]
    return Parameters(
        names=tuple(names),
        positional=sum(not one.kwarg_only for one in found),
        defaults={name: one.default_value for name, one in zip(names, found, strict=True) if one.has_default_value()},
    )


def _op(overload: torch._ops.OpOverload, run: Callable[..., Any], *, view: bool = False, given: int = 2) -> AtenOp:
    return AtenOp(overload, _parameters(overload), view, run, given)


def _slice(x: torch.Tensor, dim: int, begin: int, end: int) -> torch.Tensor:
    return x[(slice(None),) * dim + (slice(begin, end),)]


_aten = torch.ops.aten
ATEN: Mapping[str, AtenOp] = {
    op.name: op
    for op in (
        _op(_aten.add.Tensor, torch.add),
        _op(_aten.mul.Tensor, torch.mul),
        _op(_aten.view.default, lambda x, shape: x.view(shape), view=True),
        _op(_aten.slice.Tensor, _slice, view=True, given=4),
        _op(_aten.permute.default, lambda x, dims: x.permute(dims), view=True),
    )
}
_BY_OVERLOAD: Mapping[Any, AtenOp] = {op.overload: op for op in ATEN.values()}


def aten_of(target: Any) -> AtenOp | None:
    """The op of aten that a graph node's target calls; None when it is not one of the table."""
    return _BY_OVERLOAD.get(target)
