"""Add calls to a graph, each with its type, its origin and a readable name."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from ingot.ir.infer import infer
from ingot.ir.infer_placement import infer_placement
from ingot.ir.program import Program, RegionCall, target_name


def short_name(target: Any) -> str:
    """Return the base of the names of nodes that call `target`."""
    if target is operator.getitem:
        return "item"
    if isinstance(target, RegionCall):
        return f"region_{target.name}"
    return target_name(target).split(".")[1]


def call(
    program: Program,
    target: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    origin: str = "",
) -> fx.Node:
    """Add a call at the graph's insert point and infer its type. Raises VerifyError if the arguments do not fit."""
    value_type = infer(target, args, kwargs or {}, program)
    node = program.graph.create_node("call_function", target, tuple(args), dict(kwargs or {}), name=short_name(target))
    node.meta["type"] = value_type
    if program.mesh:
        set_placement(node, program)
    if origin:
        node.meta["origin"] = origin
    return node


def set_placement(node: fx.Node, program: Program) -> None:
    """Infer and set the placement of a call. Raises VerifyError if its op does not accept the arguments' placements."""
    node.meta.pop("placement", None)
    if placement := infer_placement(node, program):
        node.meta["placement"] = placement
