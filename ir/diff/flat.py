"""A program in the form that a diff compares: for each placeholder and call (an item), what it reads and what reads it.

Regions are expanded: the calls of a region are items like all others, and the region call is their group. A result of a
call with several results is the call and an index.
"""

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from ingot.ir.diff.follows import misfit
from ingot.ir.errors import VerifyError
from ingot.ir.layout import TRANSPOSE
from ingot.ir.ops import Effect, op_of
from ingot.ir.ops.aten import definition_of
from ingot.ir.origin import layer_of
from ingot.ir.program import Program, RegionCall, target_name
from ingot.ir.recipe import Recipe
from ingot.ir.text import print_argument, value_name
from ingot.ir.types import Placement

WHOLE = -1  # the index of a value that is not an item of a tuple


@dataclass(eq=False)
class Item:
    """A placeholder or call of a program, in the form that a diff compares.

    name     its name in the program's text
    op       the op's name, or "input", "param" or "state"
    node     its node in the graph
    program  the program or region (calls that are compiled together) that holds the node
    attrs    the call's arguments as text, by parameter, with "%" in place of nodes
    args     the values that the call reads, by parameter: (item, index of its result; WHOLE if it has only one)
    reads    the names of these values in the program's text, by parameter
    group    the call of the region around the item; None outside regions
    recipe   for a param: how it is made from checkpoint tensors
    layer    the layer of a call; None outside layers
    users    the calls that read it: (item, parameter, index of the result that is read)
    outputs  the outputs of the program that return it: (name, index of the result)
    aliases  getitem nodes and calls of regions that return one of its results: (index of the result, node, its program)
    value, usage, coarse, full
             numbers that are equal for equal items; `identify` sets them
    """

    name: str
    op: str
    node: fx.Node
    program: Program
    attrs: dict[str, str] = field(default_factory=dict)
    args: dict[str, "ItemResult"] = field(default_factory=dict)
    reads: dict[str, str] = field(default_factory=dict)
    group: "Group | None" = None
    recipe: Recipe | None = None
    layer: int | None = None
    users: list[tuple["Item", str, int]] = field(default_factory=list)
    outputs: list[tuple[str, int]] = field(default_factory=list)
    aliases: list[tuple[int, fx.Node, Program]] = field(default_factory=list)
    value: int = -1
    usage: int = -1
    coarse: int = -1
    full: int = -1

    @property
    def is_call(self) -> bool:
        return self.node.op == "call_function"

    @property
    def type(self) -> str:
        """Return the declared type as text. For a state it is the type of the state's tensor."""
        if self.op == "state":
            return str(self.program.states[self.name].type)
        return str(self.node.meta["type"])

    @property
    def placement(self) -> str:
        if self.op == "param":
            spec = self.program.params[self.name]
            return str(spec.split) if spec.split else placement_text(spec.placement)
        if self.op == "state":
            return placement_text(self.program.states[self.name].placement)
        return placement_text(self.node.meta.get("placement", ()))

    @property
    def backend(self) -> str:
        """Return the backend of the item's node. If it has none, return the backend of the region around it, or "".

        A region is a set of calls that are compiled together.
        """
        return self.own_backend or (self.group.backend if self.group is not None else "")

    @property
    def own_backend(self) -> str:
        return str(self.node.meta.get("backend", ""))

    @property
    def turned(self) -> Recipe | None:
        """Return the recipe of the weight in row-major order, if this item transposes a column-major weight, else None.

        A recipe says how a weight is made from checkpoint tensors. With it a diff sees that a row-major and a
        column-major weight hold the same numbers.
        """
        if not self.is_call or self.node.target is not TRANSPOSE or len(self.args) != 1:
            return None
        held = next(iter(self.args.values()))[0].recipe
        if held is None or held.step != "permute":
            return None
        there, back = held.attr("dims"), self.node.args[1] if len(self.node.args) > 1 else self.node.kwargs.get("dims")
        if not isinstance(there, tuple) or not isinstance(back, list | tuple) or len(there) != len(back):
            return None
        known = all(isinstance(dim, int) and 0 <= dim < len(there) for dim in (*there, *back))
        return held.inputs[0] if known and [there[dim] for dim in back] == list(range(len(there))) else None

    @property
    def random(self) -> bool:
        """Return whether the op draws new random numbers in each call. Equal calls then have different results."""
        op = op_of(self.node.target)
        return op is not None and op.effect is Effect.RANDOM


ItemResult = tuple[Item, int]


@dataclass(eq=False)
class Group:
    """One call of a region, in the form that a diff compares. A region is calls that are compiled together.

    backend       the backend of the region
    call_backend  the backend that the call's node names
    layer         the layer of the call; None outside layers
    surplus       the number of the region's inputs that are unused or passed twice
    unfit         how the call's declared type differs from what the region returns; "" if it does not
    members       the items of the calls inside the region
    results       the values that the call returns
    signature     a number that is equal for equal calls of regions
    """

    name: str
    backend: str
    call_backend: str
    layer: int | None
    node: fx.Node
    surplus: int = 0
    unfit: str = ""
    members: list[Item] = field(default_factory=list)
    results: list[ItemResult] = field(default_factory=list)
    signature: int = -1


@dataclass(eq=False)
class Flat:
    """A program in the form that a diff compares.

    A region is a set of calls that are compiled together. The calls inside it take the place of the region's call.

    items    all placeholders and calls, in order
    groups   the calls of regions
    outputs  the program's outputs by name: (item, index of its result)
    """

    program: Program
    items: list[Item] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    outputs: dict[str, ItemResult] = field(default_factory=dict)


def placement_text(placement: tuple[Placement, ...]) -> str:
    """Return as text how a value is placed on a mesh; "" if every rank has all of it."""
    return " ".join(sorted(str(place) for place in placement if place.kind != "replicated"))


@dataclass
class _Scope:
    """A program or region (calls that are compiled together) while `flatten` reads it.

    values  the value of each node: (item, index of its result)
    tuples  the results of each call of a region that has several results
    group   the call of the region that is read; None for a program
    """

    program: Program
    values: dict[fx.Node, ItemResult] = field(default_factory=dict)
    tuples: dict[fx.Node, tuple[ItemResult, ...]] = field(default_factory=dict)
    group: Group | None = None
    shift: int = 0  # layer of the call minus the layer in the region's body

    def value(self, node: fx.Node) -> ItemResult:
        if node not in self.values:
            raise VerifyError(f"%{node.name} is a tuple", expected="one of its items")
        return self.values[node]


def flatten(program: Program) -> Flat:
    """Return a program in the form that a diff compares.

    A region is a set of calls that are compiled together. The calls inside it take the place of the region's call.
    Raises VerifyError if the region's call does not fit the region's inputs.
    """
    flat, scope = Flat(program), _Scope(program)
    for node in program.graph.nodes:
        if node.op == "placeholder":
            item = Item(str(node.target), node.meta["kind"], node, program)
            if item.op == "param":
                item.recipe = _in_order(program.params[item.name].recipe)
            flat.items.append(item)
            scope.values[node] = item, WHOLE
        elif node.op == "call_function":
            _add(node, scope, flat)
    for name, node in program.output_nodes().items():
        item, index = flat.outputs[name] = scope.value(node)
        item.outputs.append((name, index))
    for item in flat.items:
        for slot, (source, index) in item.args.items():
            source.users.append((item, slot, index))
    return flat


def _in_order(recipe: Recipe) -> Recipe:
    """Return a weight's recipe with the attributes of each step sorted by name.

    A diff compares recipes so, because the order of attributes means nothing.
    """
    return replace(
        recipe, inputs=tuple(map(_in_order, recipe.inputs)), attrs=tuple(sorted(recipe.attrs, key=lambda one: one[0]))
    )


def _add(node: fx.Node, scope: _Scope, flat: Flat) -> None:
    if isinstance(node.target, RegionCall):
        _open(node, scope, flat)
    elif node.target is operator.getitem:
        _take_item(node, scope)
    else:
        item = Item(node.name, target_name(node.target), node, scope.program, group=scope.group)
        op = definition_of(node.target)
        assert op is not None
        for name, argument in op.parameters.name(node.args, node.kwargs).items():
            item.attrs[name] = _attribute(argument)
            for slot, source in _sources(name, argument):
                item.args[slot], item.reads[slot] = scope.value(source), value_name(source)
        layer = layer_of(str(node.meta.get("origin", "")))
        item.layer = layer + scope.shift if layer is not None else None
        flat.items.append(item)
        if scope.group is not None:
            scope.group.members.append(item)
        scope.values[node] = item, WHOLE


def _take_item(node: fx.Node, scope: _Scope) -> None:
    """Record which result of a call a getitem node takes. The node does not become an item."""
    if len(node.args) != 2 or not isinstance(node.args[0], fx.Node) or type(node.args[1]) is not int:
        raise VerifyError(f"%{node.name} takes no item", expected="getitem(%tuple, number)")
    whole: fx.Node = node.args[0]
    index: int = node.args[1]
    if whole in scope.tuples:
        items = scope.tuples[whole]
        if not 0 <= index < len(items):
            raise VerifyError(f"%{node.name} takes item {index} of {len(items)}")
        item, index = items[index]
    else:
        item, _ = scope.value(whole)
    item.aliases.append((index, node, scope.program))
    scope.values[node] = item, index


def _open(node: fx.Node, scope: _Scope, flat: Flat) -> None:
    """Add the calls inside a region to the items of `flat`. `node` is the call of the region.

    A region is a set of calls that are compiled together.
    """
    assert isinstance(node.target, RegionCall)
    region = scope.program.regions.get(node.target.name)
    if region is None:
        raise VerifyError(
            f"unknown region '{node.target.name}'", expected=", ".join(scope.program.regions) or "no region exists"
        )
    body = region.body
    inputs = list(body.placeholders())
    given = [scope.value(value) for value in node.args if isinstance(value, fx.Node)]
    if node.kwargs or len(inputs) != len(node.args) or len(given) != len(node.args):
        raise VerifyError(f"region {region.name} is called with {len(node.args)} values", expected=str(len(inputs)))
    layer = layer_of(str(node.meta.get("origin", "")))
    group = Group(region.name, region.backend, str(node.meta.get("backend", "")), layer, node)
    group.surplus = len(inputs) - len({value for inner, value in zip(inputs, given, strict=True) if inner.users})
    group.unfit = misfit(node, scope.program)
    flat.groups.append(group)
    inside = _Scope(body, dict(zip(inputs, given, strict=True)), group=group, shift=_shift(layer, body))
    for inner in body.calls():
        _add(inner, inside, flat)
    results = tuple(inside.value(inner) for inner in body.output_nodes().values())
    group.results = list(results)
    if len(results) == 1:
        item, index = scope.values[node] = results[0]
        item.aliases.append((index, node, scope.program))
    else:
        scope.tuples[node] = results


def _shift(layer: int | None, body: Program) -> int:
    """Return the layer of a region's call minus the layer that the calls inside the region name.

    A region is a set of calls that are compiled together. Layers can share a region, and the calls inside name the
    first of these layers. `layer` is the layer of the region's call. If it is None, the result is 0.
    """
    origins = [str(node.meta["origin"]) for node in body.calls() if node.meta.get("origin")]
    first = layer_of(f"{origins[0]} … {origins[-1]}") if origins else None
    return layer - first if layer is not None and first is not None else 0


def _attribute(value: Any) -> str:
    """Return an argument of a call as text, with "%" in place of each node. Only constants show."""
    if isinstance(value, fx.Node):
        return "%"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_attribute, value)) + "]"
    return print_argument(value)


def _sources(name: str, value: Any) -> Iterator[tuple[str, fx.Node]]:
    if isinstance(value, fx.Node):
        yield name, value
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            yield from _sources(f"{name}[{place}]", item)
