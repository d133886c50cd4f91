"""What a rewrite may do wrong: every change of what it made that still verifies."""

import operator
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ingot.ir import ops
from ingot.ir.ops import op_of
from ingot.ir.ops.activations import ACTIVATIONS
from ingot.ir.program import VIEWS, Program, RegionCall, target_name
from ingot.ir.recipe import Recipe
from ingot.ir.types import StateType, TensorType
from planted.changes import (
    Change,
    bypass,
    call_other_region,
    nodes_of,
    pairs,
    read_before_write,
    rounded_through,
    same_type,
    set_argument,
    set_attribute,
    set_recipe,
    swap_arguments,
    swap_uses,
    value_name,
    wrong_edge,
)

_SLICE = torch.ops.aten.slice.Tensor


def wrong_rewrites(program: Program, made: set[str], known: set[str]) -> list[Change]:
    """The ways in which the rewrite that made the values `made` of `program` could have gone wrong.

    `known` are the values that are there whenever the rewrite is: what was there before it, or was made earlier.
    """
    nodes = nodes_of(program)
    calls = [nodes[name] for name in made if name in nodes and nodes[name].op == "call_function"]
    calls.sort(key=list(program.graph.nodes).index)
    found: list[Change] = []
    for node in calls:
        found += _wrong_attributes(node)
        found += _swapped_arguments(node)
        found += _wrong_inputs(program, node, made | known)
        found += _wrong_item(node)
        found += _narrowed(node)
        if isinstance(node.target, RegionCall):
            found += _other_regions(program, node)
    parts = [node for node in calls if node.target in (_SLICE, operator.getitem)]
    for one, other in pairs(parts):
        if same_type(one, other) and not isinstance(one.meta["type"], StateType):
            found.append(swap_uses(one, other, "swapped results", f"%{one.name} and %{other.name} are mixed up"))
    for name in sorted(made & program.params.keys()):
        found += wrong_recipes(program, name)
    return found


_LABELS: Mapping[str, str] = {
    "eps": "wrong epsilon",
    "scale": "wrong scale",
    "mask": "wrong mask edge",
    "soft_cap": "wrong soft cap",
    "cap": "wrong soft cap",
    "limit": "wrong limit",
    "kind": "wrong activation",
    "interleaved": "wrong rope section",
    "approximate": "wrong activation",
    "page_size": "page off by one",
}


def _wrong_attributes(node: fx.Node) -> Iterator[Change]:
    for name, value in node.kwargs.items():
        for wrong in _wrong_values(name, value):
            what = f"{name} of %{node.name} is {wrong}, not {value}"
            yield set_attribute(node, name, wrong, _LABELS.get(name, f"wrong {name}"), what)
    if node.target in (ops.rope.overload, ops.qk_norm_rope_append.overload) and "interleaved" not in node.kwargs:
        what = f"%{node.name} rotates interleaved elements"
        yield set_attribute(node, "interleaved", True, "wrong rope section", what)
    if node.target == _SLICE:
        dim, begin, end = node.args[1:]
        source = node.args[0]
        assert isinstance(source, fx.Node) and isinstance(begin, int) and isinstance(end, int)
        for shift in (1, -1):
            if begin + shift >= 0 and end + shift <= int(source.meta["type"].shape[dim]):
                yield _shifted(node, shift)


def _shifted(node: fx.Node, shift: int) -> Change:
    begin, end = int(str(node.args[2])), int(str(node.args[3]))
    change = set_argument(node, 2, begin + shift, "slice off by one", f"%{node.name} begins at {begin + shift}")
    target = value_name(node)

    def apply(program: Program) -> None:
        call = nodes_of(program)[target]
        call.args = (*call.args[:2], begin + shift, end + shift)

    return replace(change, apply=apply)


def _wrong_values(name: str, value: Any) -> list[Any]:
    if name == "eps":
        return [value * 4 + 1e-3, value / 8]
    if name in ("scale", "cap"):
        return [value * 1.25, value / 2]
    if name == "mask":
        return [wrong_edge(value, -1), wrong_edge(value, 1), None]
    if name == "soft_cap":
        return [value * 1.25, None]
    if name in ("interleaved", "norm_last"):
        return [None]
    if name == "approximate":
        return ["none" if value == "tanh" else "tanh"]
    if name == "kind":
        return [kind for kind in ACTIVATIONS if kind != value]
    if name == "page_size":
        return [value - 1, value // 2]
    return []


def _swapped_arguments(node: fx.Node) -> Iterator[Change]:
    places = [(place, arg) for place, arg in enumerate(node.args) if isinstance(arg, fx.Node)]
    if node.target == torch.ops.aten.add.Tensor or node.target is operator.getitem:
        return
    for (left, one), (right, other) in pairs(places):
        # A state is written by its own place among the arguments.
        if one is not other and same_type(one, other) and not isinstance(one.meta["type"], StateType):
            names = f"{value_name(one)} and {value_name(other)}"
            yield swap_arguments(node, left, right, "swapped arguments", f"%{node.name} takes {names} the other way")


def _wrong_inputs(program: Program, node: fx.Node, known: set[str]) -> Iterator[Change]:
    if node.target is operator.getitem:
        return
    order = {other: index for index, other in enumerate(program.graph.nodes)}
    for place, arg in enumerate(node.args):
        if not isinstance(arg, fx.Node):
            continue
        if isinstance(arg.meta["type"], StateType):
            yield from _wrong_states(program, node, place, arg, known, order)
            continue
        for other in program.graph.nodes:
            if order[other] >= order[node] or other.op == "output" or other in node.args:
                continue
            if value_name(other) in known and same_type(other, arg):
                what = f"%{node.name} reads {value_name(other)}, not {value_name(arg)}"
                yield set_argument(node, place, other, _input_label(arg), what)


def _input_label(arg: fx.Node) -> str:
    if arg.op == "placeholder" and arg.meta["kind"] == "param":
        return "wrong rope table" if str(arg.target).startswith("ropes.") else "wrong weight"
    value_type = arg.meta["type"]
    floating = isinstance(value_type, TensorType) and value_type.dtype.is_floating_point
    return "wrong value" if floating else "wrong index"


def _wrong_states(
    program: Program, node: fx.Node, place: int, arg: fx.Node, known: set[str], order: Mapping[fx.Node, int]
) -> Iterator[Change]:
    """An attention that reads the cache before it is written, or another layer's."""
    if node.target != ops.paged_attention.overload or arg.op != "call_function":
        return
    old = arg.args[0] if op_of(arg.target) is ops.kv_append else None
    if isinstance(old, fx.Node) and order[arg] < order[node]:
        what = f"%{node.name} reads {value_name(old)} before %{arg.name} writes it"
        yield read_before_write(node, arg, old, "stale state", what)
    for other in program.calls():
        other_state = isinstance(other.meta["type"], StateType) and other is not arg and order[other] < order[node]
        if other_state and value_name(other) in known and _cache_type(program, other) == _cache_type(program, arg):
            what = f"%{node.name} reads the cache {other.meta['type'].name}"
            yield set_argument(node, place, other, "wrong cache", what)


def _cache_type(program: Program, node: fx.Node) -> Any:
    return program.states[node.meta["type"].name].type


def _wrong_item(node: fx.Node) -> Iterator[Change]:
    if node.target is not operator.getitem:
        return
    source = node.args[0]
    assert isinstance(source, fx.Node)
    for index, item in enumerate(source.meta["type"].items):
        if index != node.args[1] and item == node.meta["type"] and not isinstance(item, StateType):
            yield set_argument(node, 1, index, "wrong result index", f"%{node.name} takes result {index}")


def _narrowed(node: fx.Node) -> Iterator[Change]:
    value_type = node.meta["type"]
    computes = node.target not in VIEWS
    if computes and isinstance(value_type, TensorType) and value_type.dtype is torch.float32:
        what = f"%{node.name} is rounded to bfloat16"
        yield rounded_through(node, torch.bfloat16, "cast through a narrower type", what)


def _other_regions(program: Program, node: fx.Node) -> Iterator[Change]:
    def signature(name: str) -> Any:
        body = program.regions[name].body
        outputs = [item.meta["type"] for item in body.output_nodes().values()]
        return list(body.input_types().values()), outputs

    own = node.target.name  # type: ignore[union-attr]
    callers = [call.target.name for call in program.calls() if isinstance(call.target, RegionCall)]
    for name in program.regions:
        # A region without calls would not verify.
        if name != own and callers.count(own) > 1 and signature(name) == signature(own):
            yield call_other_region(node, name, "wrong region", f"%{node.name} calls {name}, not {own}")


def wrong_recipes(program: Program, param: str) -> Iterator[Change]:
    """Other recipes that make a tensor of the same shape."""
    spec = program.params[param]
    for label, made in _wrong_steps(spec.recipe):
        yield set_recipe(program, param, made, label, f"the recipe of {param} is {str(made)[:200]}")
    for other, theirs in program.params.items():
        same = replace(theirs, recipe=spec.recipe) == spec and theirs.recipe != spec.recipe
        if same and theirs.recipe.sources() and not theirs.recipe.sources() & spec.recipe.sources():
            yield set_recipe(program, param, theirs.recipe, "wrong weight", f"{param} gets the tensor of {other}")
            break
    shape = spec.type.shape
    if len(shape) == 2 and shape[0] == shape[1] and spec.recipe.step != "shard":
        turned = Recipe("permute", (spec.recipe,), (("dims", (1, 0)),))
        yield set_recipe(program, param, turned, "transposed weight", f"{param} is stored by columns, read by rows")


def _wrong_steps(recipe: Recipe) -> Iterator[tuple[str, Recipe]]:
    """One step of a recipe done otherwise."""
    if recipe.step == "concat":
        for left, right in pairs(list(range(len(recipe.inputs)))):
            inputs = list(recipe.inputs)
            inputs[left], inputs[right] = inputs[right], inputs[left]
            yield "swapped weights", replace(recipe, inputs=tuple(inputs))
            inputs[right] = inputs[left]
            yield "repeated weight", replace(recipe, inputs=tuple(inputs))
    if recipe.step == "slice":
        attrs = dict(recipe.attrs)
        begin, end = int(str(attrs["begin"])), int(str(attrs["end"]))
        if begin:
            moved = {**attrs, "begin": begin - 1, "end": end - 1}
            yield "slice off by one", replace(recipe, attrs=tuple(sorted(moved.items())))
    if recipe.step == "shard":
        yield from _wrong_shards(recipe)
    for place, inner in enumerate(recipe.inputs):
        for label, made in _wrong_steps(inner):
            inputs = [*recipe.inputs[:place], made, *recipe.inputs[place + 1 :]]
            yield label, replace(recipe, inputs=tuple(inputs))


def _wrong_shards(recipe: Recipe) -> Iterator[tuple[str, Recipe]]:
    """The parts of a rank repeated as wholes where each is repeated in place."""
    for place, inner in enumerate(recipe.inputs):
        if inner.step == "reshape" and inner.inputs[0].step == "repeat":
            repeat = inner.inputs[0]
            attrs = dict(repeat.attrs)
            tiled = Recipe("concat", (repeat.inputs[0],) * int(str(attrs["times"])), (("dim", attrs["dim"]),))
            made = replace(inner, inputs=(tiled,))
            inputs = [*recipe.inputs[:place], made, *recipe.inputs[place + 1 :]]
            yield "tiled for repeated", replace(recipe, inputs=tuple(inputs))


def bogus_rewrites(program: Program, param_only: bool = False) -> Iterator[tuple[str, Change]]:
    """Rewrites at places where a pass has nothing to do, by their anchors."""
    for node in program.calls():
        for source in () if param_only else node.args[:2]:
            if not isinstance(source, fx.Node) or isinstance(node.meta["type"], StateType):
                continue
            if same_type(source, node) and source.op == "call_function":
                residual = node.target == torch.ops.aten.add.Tensor
                label = "missing residual" if residual else "dropped call"
                what = f"%{node.name}, {target_name(node.target)}, is taken for %{source.name}"
                yield node.name, bypass(node, source, label, what)
    for name in program.params if param_only else ():
        for change in wrong_recipes(program, name):
            if change.name == "transposed weight":
                yield name, change
