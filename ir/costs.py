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
    together. It costs the flops of these calls, but only the bytes that they read of its arguments, and its results.
    """
    if node.target is operator.getitem:
        return Cost()
    results = _tensors(node, program, sizes)
    if isinstance(node.target, RegionCall):
        body = program.regions[node.target.name].body
        inside = sum((call_cost(call, body, sizes) for call in body.calls()), Cost())
        return Cost(inside.flops, _read(body, sizes) + bytes_of(*results))
    args = [_sized(value, program, sizes) for value in node.args]
    op = definition_of(node.target)
    assert op is not None
    return op.count(args, dict(node.kwargs), results)


def _read(body: Program, sizes: Mapping[str, int]) -> int:
    """Return the bytes that the calls of a region read of its inputs.

    Of each input, the call that reads most counts: other calls may need no other part of it.
    """
    most: dict[fx.Node, int] = {}
    for node in body.calls():
        if (op := definition_of(node.target)) is None:
            continue
        moved = op.moved([_sized(value, body, sizes) for value in node.args], node.kwargs)
        for name, value in op.bind(node.args, node.kwargs).items():
            if isinstance(value, fx.Node) and value.op == "placeholder":
                most[value] = max(most.get(value, 0), moved[name])
    # Several tokens may look up the same row, so a table may be smaller than the rows that its calls look up.
    return sum(min(count, bytes_of(_sized(one, body, sizes))) for one, count in most.items())


def _tensors(node: fx.Node, program: Program, sizes: Mapping[str, int]) -> list[torch.Tensor]:
    """Return a meta tensor for each result of a node."""
    value_type = node.meta["type"]
    items = value_type.items if isinstance(value_type, TupleType) else (value_type,)
    return [_meta(item, program, sizes) for item in items]


def _sized(value: Any, program: Program, sizes: Mapping[str, int]) -> Any:
    """Return a meta tensor for an argument that is a node. Return any other argument as it is."""
    return _meta(value.meta["type"], program, sizes) if isinstance(value, fx.Node) else value


def _meta(value_type: ValueType, program: Program, sizes: Mapping[str, int]) -> torch.Tensor:
    if isinstance(value_type, StateType):
        value_type = program.states[value_type.name].type
    assert isinstance(value_type, TensorType)
    return sized_meta_tensor(value_type, sizes)
