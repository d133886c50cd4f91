"""Changes of a program, by the names of its values: what a rewrite that goes wrong would have left."""

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ingot.ir import build, ops
from ingot.ir.build import set_placement
from ingot.ir.infer import infer
from ingot.ir.program import VIEWS, Program, RegionCall
from ingot.ir.recipe import Recipe


def value_name(node: fx.Node) -> str:
    return str(node.target) if node.op == "placeholder" else node.name


def nodes_of(program: Program) -> dict[str, fx.Node]:
    return {value_name(node): node for node in program.graph.nodes if node.op != "output"}


@dataclass(frozen=True)
class Change:
    """`name` is its class, `what` tells it in words; `wrong` are the values that come out wrong by it."""

    name: str
    what: str
    wrong: tuple[str, ...]
    apply: Callable[[Program], None]


def _retyped(program: Program, first: fx.Node) -> None:
    """Types and placements of a changed call and of all that follows from it."""
    waiting = [first]
    while waiting:
        node = waiting.pop(0)
        if node.op != "call_function":
            continue
        found = infer(node.target, node.args, node.kwargs, program)
        changed = found != node.meta["type"]
        node.meta["type"] = found
        if program.mesh:
            set_placement(node, program)
        if changed:
            waiting.extend(node.users)


def with_names(node: fx.Node) -> tuple[str, ...]:
    """A call, and the items that are taken from it: one of them may be what is seen to be wrong."""
    return (value_name(node), *(user.name for user in node.users if user.target is operator.getitem))


def with_users(node: fx.Node) -> tuple[str, ...]:
    return (value_name(node), *(value_name(user) for user in node.users if user.op != "output"))


def set_argument(node: fx.Node, place: int, value: Any, name: str, what: str) -> Change:
    """Argument `place` of a call becomes `value`, a constant or a node."""
    wrong = with_users(node) if node.target in VIEWS else with_names(node)
    if node.target in VIEWS:  # a view computes nothing, so who is wrong is as well who reads it, or what it is of
        wrong = (*wrong, *(value_name(of) for of in node.all_input_nodes[:1]))
    target, source = value_name(node), value_name(value) if isinstance(value, fx.Node) else None

    def apply(program: Program) -> None:
        nodes = nodes_of(program)
        call = nodes[target]
        call.update_arg(place, value if source is None else nodes[source])
        _retyped(program, call)

    return Change(name, what, wrong, apply)


def set_attribute(node: fx.Node, attribute: str, value: Any, name: str, what: str) -> Change:
    """None leaves the attribute out."""
    target = value_name(node)

    def apply(program: Program) -> None:
        call = nodes_of(program)[target]
        kwargs = {key: old for key, old in call.kwargs.items() if key != attribute}
        call.kwargs = kwargs if value is None else {**kwargs, attribute: value}
        _retyped(program, call)

    return Change(name, what, with_names(node), apply)


def swap_arguments(node: fx.Node, left: int, right: int, name: str, what: str) -> Change:
    target = value_name(node)

    def apply(program: Program) -> None:
        call = nodes_of(program)[target]
        args = list(call.args)
        args[left], args[right] = args[right], args[left]
        call.args = tuple(args)
        _retyped(program, call)

    return Change(name, what, with_names(node), apply)


def swap_uses(left: fx.Node, right: fx.Node, name: str, what: str) -> Change:
    """Whoever read one of two values reads the other."""
    names = value_name(left), value_name(right)

    def apply(program: Program) -> None:
        nodes = nodes_of(program)
        one, other = nodes[names[0]], nodes[names[1]]
        users = [*one.users], [*other.users]
        for user in users[0]:
            user.replace_input_with(one, other)
        for user in users[1]:
            if user not in users[0]:
                user.replace_input_with(other, one)

    return Change(name, what, (*with_users(left), *with_users(right)), apply)


def bypass(node: fx.Node, source: fx.Node, name: str, what: str) -> Change:
    """Whoever read the call reads `source`, its argument; the call is gone."""
    names = value_name(node), value_name(source)

    def apply(program: Program) -> None:
        nodes = nodes_of(program)
        call = nodes[names[0]]
        call.replace_all_uses_with(nodes[names[1]])
        program.graph.erase_node(call)

    return Change(name, what, (*with_users(node), names[1]), apply)


def read_before_write(reader: fx.Node, writer: fx.Node, state: fx.Node, name: str, what: str) -> Change:
    """`reader` of a state's new version reads the old one, in front of the write."""
    names = value_name(reader), value_name(writer), value_name(state)

    def apply(program: Program) -> None:
        nodes = nodes_of(program)
        call, write, old = (nodes[one] for one in names)
        call.replace_input_with(write, old)
        write.prepend(call)

    return Change(name, what, with_names(reader), apply)


def rounded_through(node: fx.Node, dtype: torch.dtype, name: str, what: str) -> Change:
    """The call's result is cast to `dtype` and back."""
    target = value_name(node)

    def apply(program: Program) -> None:
        call = nodes_of(program)[target]
        own = call.meta["type"].dtype
        with program.graph.inserting_after(call):
            narrow = build.call(program, ops.cast.overload, (call,), {"dtype": dtype})
        with program.graph.inserting_after(narrow):
            back = build.call(program, ops.cast.overload, (narrow,), {"dtype": own})
        for made in (narrow, back):
            made.meta["origin"] = call.meta.get("origin", "")
            if "backend" in call.meta:
                made.meta["backend"] = "reference"
        call.replace_all_uses_with(back, delete_user_cb=lambda user: user is not narrow)

    return Change(name, what, (*with_users(node), "cast", *(f"cast_{number}" for number in range(1, 9))), apply)


def set_recipe(program: Program, param: str, recipe: Recipe, name: str, what: str) -> Change:
    def apply(changed: Program) -> None:
        changed.params[param] = replace(changed.params[param], recipe=recipe)

    return Change(name, what, with_users(program.find(param)), apply)


def call_other_region(node: fx.Node, region: str, name: str, what: str) -> Change:
    target = value_name(node)

    def apply(program: Program) -> None:
        nodes_of(program)[target].target = RegionCall(region)

    return Change(name, what, with_names(node), apply)


def same_type(first: fx.Node, second: fx.Node) -> bool:
    """One could stand where the other does, as far as types and placements tell."""
    return bool(first.meta["type"] == second.meta["type"]) and first.meta.get("placement") == second.meta.get(
        "placement"
    )


def pairs(items: list[Any]) -> Iterator[tuple[Any, Any]]:
    for index, one in enumerate(items):
        for other in items[index + 1 :]:
            yield one, other


def wrong_edge(mask: str, by: int) -> str:
    """A mask with a size, whose size is off by so many positions."""
    kind, _, size = mask.rpartition("_")
    return f"{kind}_{max(1, int(size) + by)}"
