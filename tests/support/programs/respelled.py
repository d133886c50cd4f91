"""A program written down in another way: other names, another legal order, other spellings of the same arguments."""

import operator
import random
from dataclasses import replace
from typing import Any

from torch import fx

from ingot.ir.program import Program, Region, RegionCall, states_written
from ingot.ir.types import StateType


def respelled(program: Program, draw: random.Random) -> Program:
    """Everything is renamed but inputs, outputs and states; calls, placeholders, regions and outputs change places."""
    regions = {name: _region(region, f"again.{number}", draw) for number, (name, region) in _drawn(program, draw)}
    made = replace(
        program,
        graph=fx.Graph(),
        params={},
        states={},
        regions={region.name: region for region, _, _ in regions.values()},
        dims=dict(draw.sample(list(program.dims.items()), len(program.dims))),
        plan=None,
    )
    nodes: dict[fx.Node, fx.Node] = {}
    placeholders = list(program.placeholders())
    for number, node in enumerate(draw.sample(placeholders, len(placeholders))):
        nodes[node] = _placeholder(node, program, made, f"weight.{number}")
    # The items that a region gives change places with the results of its body.
    for number, node in enumerate(_order(program, draw)):
        args, kwargs = _spelled(node, draw)
        target = node.target
        if isinstance(target, RegionCall):
            region, inputs, _ = regions[target.name]
            target, args = RegionCall(region.name), [args[place] for place in inputs]
        elif target is operator.getitem and isinstance(node.args[0].target, RegionCall):
            args = [args[0], regions[node.args[0].target.name][2].index(args[1])]
        nodes[node] = _copied(made, node, target, args, kwargs, nodes, f"again_{number}", draw)
        if isinstance(node.target, RegionCall):
            _reorder_type(nodes[node], regions[node.target.name][2])
    outputs = list(program.output_nodes().items())
    made.set_outputs({name: nodes[node] for name, node in draw.sample(outputs, len(outputs))})
    return made


def _drawn(program: Program, draw: random.Random) -> list[tuple[int, tuple[str, Region]]]:
    return list(enumerate(draw.sample(list(program.regions.items()), len(program.regions))))


def _region(region: Region, name: str, draw: random.Random) -> tuple[Region, list[int], list[int]]:
    """The region, and which of the former inputs and results each of its own is."""
    old = region.body
    body = replace(old, name=name, graph=fx.Graph(), dims=dict(old.dims))
    placeholders, results = list(old.placeholders()), list(old.output_nodes().values())
    inputs, outputs = ([*range(len(found))] for found in (placeholders, results))
    draw.shuffle(inputs)
    draw.shuffle(outputs)
    nodes = {placeholders[place]: body.add_input(f"x{place}", placeholders[place].meta["type"]) for place in inputs}
    for number, node in enumerate(_order(old, draw)):
        args, kwargs = _spelled(node, draw)
        nodes[node] = _copied(body, node, node.target, args, kwargs, nodes, f"inner_{number}", draw)
    body.set_outputs({f"y{place}": nodes[results[place]] for place in outputs})
    return Region(name, body, region.backend, region.executable), inputs, outputs


def _placeholder(node: fx.Node, old: Program, made: Program, weight: str) -> fx.Node:
    name = str(node.target)
    match node.meta["kind"]:
        case "param":
            return made.add_param(weight, old.params[name])
        case "state":
            return made.add_state(name, old.states[name])
    return made.add_input(name, node.meta["type"])


def _copied(
    made: Program,
    node: fx.Node,
    target: Any,
    args: list[Any],
    kwargs: dict[str, Any],
    nodes: dict[fx.Node, fx.Node],
    name: str,
    draw: random.Random,
) -> fx.Node:
    def mapped(value: Any) -> Any:
        return fx.node.map_arg(value, nodes.__getitem__)

    copy = made.graph.create_node("call_function", target, mapped(tuple(args)), mapped(kwargs), name=name)
    copy.meta.update({key: value for key, value in node.meta.items() if key != "place"})
    if "origin" in copy.meta and draw.random() < 0.5:
        copy.meta["origin"] = f"{copy.meta['origin'].rpartition(':')[0]}:{draw.randrange(1000)}"
    return copy


def _reorder_type(node: fx.Node, outputs: list[int]) -> None:
    if len(outputs) > 1:
        items = node.meta["type"].items
        node.meta["type"] = replace(node.meta["type"], items=tuple(items[place] for place in outputs))


def _order(program: Program, draw: random.Random) -> list[fx.Node]:
    """The calls in a random order in which each stands behind what it reads, and a write of a state behind the reads of
    the version that it overwrites."""
    calls = list(program.calls())
    behind = {node: {source for source in node.all_input_nodes if source.op == "call_function"} for node in calls}
    for version in program.graph.nodes:
        if isinstance(version.meta.get("type"), StateType):
            users = [user for user in version.users if user.op == "call_function"]
            for writer in (user for user in users if _writes(user, version)):
                behind[writer] |= {user for user in users if user is not writer}
    order: list[fx.Node] = []
    waiting = {node: set(sources) for node, sources in behind.items()}
    while waiting:
        node = draw.choice([node for node, sources in waiting.items() if not sources])
        order.append(node)
        del waiting[node]
        for sources in waiting.values():
            sources.discard(node)
    return order


def _writes(user: fx.Node, version: fx.Node) -> bool:
    return version in states_written(user)


def _spelled(node: fx.Node, draw: random.Random) -> tuple[list[Any], dict[str, Any]]:
    """The same arguments, by position or by name, with defaults given or left out."""
    if isinstance(node.target, RegionCall) or node.target is operator.getitem:
        return list(node.args), dict(node.kwargs)
    parameters = node.target._schema.arguments
    named = {one.name: one.default_value for one in parameters}
    named |= dict(zip(named, node.args, strict=False)) | node.kwargs
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    # aten's first parameter is `self`, which is by position everywhere.
    by_name_from = draw.randrange(1, len(parameters) + 1)
    for place, one in enumerate(parameters):
        value = named[one.name]
        if place >= by_name_from or one.kwarg_only or kwargs:
            default = one.has_default_value() and _same(value, one.default_value)
            if not default or draw.random() < 0.5:
                kwargs[one.name] = value
        else:
            args.append(value)
    return args, dict(draw.sample(list(kwargs.items()), len(kwargs)))


def _same(value: Any, default: Any) -> bool:
    return type(value) is type(default) and bool(value == default)
