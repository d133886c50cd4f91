"""Edits of calls: another op, constant or argument, one call less or more."""

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from planted.changes import wrong_edge
from torch import fx

from ingot.ir import build, ops
from ingot.ir.program import Program, RegionCall, target_of
from ingot.ir.types import TensorType
from semantic_edits.places import Edit, calls_of, pick, region_calls

# Ops that take the same arguments and mean something else.
_OTHER_OP: Mapping[str, str] = {
    "aten.add.Tensor": "aten.mul.Tensor",
    "aten.mul.Tensor": "aten.add.Tensor",
    "ingot.silu_mul": "ingot.gelu_mul",
    "ingot.gelu_mul": "ingot.silu_mul",
}

_FLOATS = ("eps", "scale", "cap", "soft_cap", "limit")

_NUMBERED = ("layer", "page_size", "parts", "mask")


def another_op(program: Program, draw: random.Random) -> Program | None:
    changed = program.copy()
    others = {target_of(name): target_of(other) for name, other in _OTHER_OP.items()}
    node = pick([node for node in calls_of(changed) if node.target in others], draw)
    if node is None:
        return None
    node.target = others[node.target]
    node.kwargs = {"approximate": "tanh"} if node.target is ops.gelu_mul.overload else {}
    return changed


def _constant(names: tuple[str, ...], change: Callable[[Any, random.Random], Any]) -> Edit:
    def edit(program: Program, draw: random.Random) -> Program | None:
        changed = program.copy()
        places = [
            (node, name)
            for node in calls_of(changed)
            for name, value in node.kwargs.items()
            if name in names and isinstance(value, int | float | str)
        ]
        if not places:
            return None
        node, name = draw.choice(places)
        node.kwargs = {**node.kwargs, name: change(node.kwargs[name], draw)}
        return changed

    return edit


another_scale = _constant(_FLOATS, lambda value, draw: value * draw.choice([0.5, 1 + 1e-9, -1.0, 10.0]))


def _another(value: Any, draw: random.Random) -> Any:
    """Another number, or a mask of another size."""
    return wrong_edge(value, 1) if isinstance(value, str) else value + draw.choice([-1, 1, 7])


another_number = _constant(_NUMBERED, _another)


def another_view(program: Program, draw: random.Random) -> Program | None:
    changed = program.copy()
    views = {torch.ops.aten.view.default, torch.ops.aten.permute.default}
    found = [node for node in calls_of(changed) if node.target in views and len(set(node.args[1][-2:])) == 2]
    if not found:
        return None
    node = draw.choice(found)
    *front, last, end = node.args[1]
    node.args = (node.args[0], [*front, end, last])
    return changed


def another_slice(program: Program, draw: random.Random) -> Program | None:
    changed = program.copy()
    node = pick([node for node in calls_of(changed) if node.target is torch.ops.aten.slice.Tensor], draw)
    if node is None:
        return None
    source, dim, begin, end = node.args
    node.args = (source, dim, begin + 1, end + 1)
    return changed


def another_cast(program: Program, draw: random.Random) -> Program | None:
    changed = program.copy()
    node = pick([node for node in calls_of(changed) if node.target is ops.cast.overload], draw)
    if node is None:
        return None
    dtypes = [torch.float16, torch.float64, torch.float32, torch.bfloat16]
    node.kwargs = {"dtype": draw.choice([dtype for dtype in dtypes if dtype is not node.kwargs["dtype"]])}
    return changed


def swapped_arguments(program: Program, draw: random.Random) -> Program | None:
    """Two arguments of one type change places."""
    changed = program.copy()
    places = [
        (node, i, j)
        for node in calls_of(changed)
        for i, left in enumerate(node.args)
        for j, right in enumerate(node.args[:i])
        if isinstance(left, fx.Node) and isinstance(right, fx.Node) and left is not right
        if left.meta["type"] == right.meta["type"]
    ]
    if not places:
        return None
    node, i, j = draw.choice(places)
    args = list(node.args)
    args[i], args[j] = args[j], args[i]
    node.args = tuple(args)
    return changed


def another_value(program: Program, draw: random.Random) -> Program | None:
    """An argument of an op is another value of the same type, from above."""
    return _another_value(program, torch._ops.OpOverload, draw)


def another_region_argument(program: Program, draw: random.Random) -> Program | None:
    """A region is called with another value of the same type, which any number of its calls may read."""
    return _another_value(program, RegionCall, draw)


def _another_value(program: Program, kind: type, draw: random.Random) -> Program | None:
    changed = program.copy()
    above: list[fx.Node] = []
    places = []
    for node in changed.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, kind):
            for place, argument in enumerate(node.args):
                if isinstance(argument, fx.Node):
                    found = argument.meta["type"]
                    places += [(node, place, one) for one in above if one is not argument and one.meta["type"] == found]
        above.append(node)
    if not places:
        return None
    node, place, value = draw.choice(places)
    args = list(node.args)
    args[place] = value
    node.args = tuple(args)
    return changed


def dropped_bias(program: Program, draw: random.Random) -> Program | None:
    changed = program.copy()
    node = pick([one for one in changed.calls(ops.linear.overload) if len(one.args) == 3], draw)
    if node is None:
        return None
    node.args = node.args[:2]
    return changed


def left_out(program: Program, draw: random.Random) -> Program | None:
    """A call is passed by: its readers read what it read."""
    changed = program.copy()
    found = [
        (node, source)
        for node in calls_of(changed)
        for source in node.all_input_nodes[:1]
        if source.meta["type"] == node.meta["type"] and node.users
    ]
    if not found:
        return None
    node, source = draw.choice(found)
    node.replace_all_uses_with(source)
    changed.graph.erase_node(node)
    return changed


def put_in(program: Program, draw: random.Random) -> Program | None:
    """A value is rounded on the way to one of its readers, or to all of them."""
    changed = program.copy()
    found = [
        node
        for node in calls_of(changed)
        if isinstance(node.meta["type"], TensorType) and node.meta["type"].dtype.is_floating_point and node.users
    ]
    if not found or changed.mesh:
        return None
    node = draw.choice(found)
    users = [user for user in node.users if user.op != "output"]
    reader = draw.choice([None, *users])
    with changed.graph.inserting_after(node):
        rounded = build.call(changed, ops.cast.overload, [node], {"dtype": node.meta["type"].dtype})
    rounded.meta["backend"] = "reference"
    for user in list(node.users):
        if user is not rounded and reader in (None, user):
            user.replace_input_with(node, rounded)
    return changed


def twice(program: Program, draw: random.Random) -> Program | None:
    """A call is made a second time, for one of its readers; no write of a state, which can be made once."""
    return _twice(program, lambda one: [node for node in calls_of(one) if not _writes(node)], draw)


def region_twice(program: Program, draw: random.Random) -> Program | None:
    """A region is called a second time, for one of the readers."""
    return _twice(program, region_calls, draw)


def _writes(node: fx.Node) -> bool:
    op = ops.op_of(node.target)
    return op is not None and bool(op.states)


def _twice(program: Program, calls: Callable[[Program], list[fx.Node]], draw: random.Random) -> Program | None:
    changed = program.copy()
    node = pick([node for node in calls(changed) if len(node.users) > 1], draw)
    if node is None:
        return None
    with changed.graph.inserting_after(node):
        again = changed.graph.node_copy(node, lambda one: one)
    draw.choice(list(node.users)).replace_input_with(node, again)
    return changed
