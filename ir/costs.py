"""The cost of calls: floating-point operations and bytes moved, for given sizes of the program's symbols."""

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from ingot.ir.infer import sized_meta_tensor
from ingot.ir.ops import op_of
from ingot.ir.ops.aten import definition_of
from ingot.ir.ops.registry import Cost, bytes_of
from ingot.ir.program import Program, RegionCall
from ingot.ir.types import StateType, TensorType, TupleType, ValueType


def call_cost(node: fx.Node, program: Program, sizes: Mapping[str, int]) -> Cost:
    """Return the flops of a call, and the bytes that it must at least read and write.

    `sizes` maps symbols such as "T" to sizes. A view costs nothing. A region is a set of calls that are compiled
    together. It costs the flops of these calls, but only the bytes of its arguments and results. Of an argument that
    calls read in part, such as the weights of experts, only that part counts.
    """
    if node.target is operator.getitem:
        return Cost()

    def tensor(value: Any) -> Any:
        return _meta(value.meta["type"], program, sizes) if isinstance(value, fx.Node) else value

    results = _tensors(node, program, sizes)
    if isinstance(node.target, RegionCall):
        body = program.regions[node.target.name].body
        inside = sum((call_cost(call, body, sizes) for call in body.calls()), Cost())
        return Cost(inside.flops, bytes_of(*map(tensor, node.args), *results) - _unread(body, sizes))
    args = [tensor(value) for value in node.args]
    op = definition_of(node.target)
    assert op is not None
    return op.count(args, dict(node.kwargs), results)


def _unread(body: Program, sizes: Mapping[str, int]) -> int:
    """Return the bytes of a region's inputs that its calls leave unread, such as weights of experts and rows of tables.

    A call counts by its largest input, so calls that read the same table count once, as the one that reads most.
    """
    unread: dict[fx.Node, int] = {}
    for node in body.calls():
        inputs = [one for one in node.all_input_nodes if one.op == "placeholder"]
        if (op := op_of(node.target)) is None or op.traffic is None or not inputs:
            continue
        largest = max(inputs, key=lambda one: bytes_of(*_tensors(one, body, sizes)))
        moved = (tensor for one in (*node.all_input_nodes, node) for tensor in _tensors(one, body, sizes))
        left = max(0, bytes_of(*moved) - call_cost(node, body, sizes).bytes)
        unread[largest] = min(left, unread.get(largest, left))
    return sum(unread.values())


def _tensors(node: fx.Node, program: Program, sizes: Mapping[str, int]) -> list[torch.Tensor]:
    """Return a meta tensor for each result of a node."""
    value_type = node.meta["type"]
    items = value_type.items if isinstance(value_type, TupleType) else (value_type,)
    return [_meta(item, program, sizes) for item in items]


def _meta(value_type: ValueType, program: Program, sizes: Mapping[str, int]) -> torch.Tensor:
    if isinstance(value_type, StateType):
        value_type = program.states[value_type.name].type
    assert isinstance(value_type, TensorType)
    return sized_meta_tensor(value_type, sizes)
