"""The cost of calls: floating-point operations and bytes moved, for given sizes of the program's symbols."""

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from ingot.ir.infer import sized_meta_tensor
from ingot.ir.ops.aten import definition_of
from ingot.ir.ops.registry import Cost, bytes_of
from ingot.ir.program import Program, RegionCall
from ingot.ir.types import StateType, TensorType, TupleType, ValueType


def call_cost(node: fx.Node, program: Program, sizes: Mapping[str, int]) -> Cost:
    """Return the flops of a call, and the bytes that it must at least read and write.

    `sizes` maps symbols such as "T" to sizes. A view costs nothing. A region is a set of calls that are compiled
    together. It costs the flops of these calls, but only the bytes of its arguments and results.
    """
    if node.target is operator.getitem:
        return Cost()

    def tensor(value: Any) -> Any:
        return _meta(value.meta["type"], program, sizes) if isinstance(value, fx.Node) else value

    value_type = node.meta["type"]
    items = value_type.items if isinstance(value_type, TupleType) else (value_type,)
    results = [_meta(item, program, sizes) for item in items]
    if isinstance(node.target, RegionCall):
        body = program.regions[node.target.name].body
        inside = sum((call_cost(call, body, sizes) for call in body.calls()), Cost())
        return Cost(inside.flops, bytes_of(*map(tensor, node.args), *results))
    args = [tensor(value) for value in node.args]
    op = definition_of(node.target)
    assert op is not None
    return op.count(args, dict(node.kwargs), results)


def _meta(value_type: ValueType, program: Program, sizes: Mapping[str, int]) -> torch.Tensor:
    if isinstance(value_type, StateType):
        value_type = program.states[value_type.name].type
    assert isinstance(value_type, TensorType)
    return sized_meta_tensor(value_type, sizes)
