"""Add calls to a graph, each with its type, its origin and a readable name."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from ingot.ir.infer import infer
from ingot.ir.infer_placement import infer_placement
from ingot.ir.program import Program, RegionCall, target_name


def short_name(target: Any) -> str:
    """Return the prefix for the names of nodes that call `target`, such as "linear" for `ingot.linear`.

    fx appends a number to the prefix, as in "linear_3".
    """
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
    """Add a call of the op `target` to the graph, and return its node.

    The node is added at the graph's insert point, and its type is inferred. On a mesh of devices, its placement is
    inferred too. `origin` says where the call comes from, as in "layer 3, FILE:LINE". Raises VerifyError if the op does
    not accept the arguments.
    """
    value_type = infer(target, args, kwargs or {}, program)
    node = program.graph.create_node("call_function", target, tuple(args), dict(kwargs or {}), name=short_name(target))
    node.meta["type"] = value_type
    if program.mesh:
        set_placement(node, program)
    if origin:
        node.meta["origin"] = origin
    return node


def set_placement(node: fx.Node, program: Program) -> None:
    """Infer how the result of a call is distributed over the mesh, and store it in `node.meta["placement"]`.

    The key is absent if every rank has the whole result. Raises VerifyError if the op does not accept how its arguments
    are distributed.
    """
    node.meta.pop("placement", None)
    if placement := infer_placement(node, program):
        node.meta["placement"] = placement
