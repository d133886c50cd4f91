"""Single edits that change what a program means: the faults that a diff, a test or a person has to find.

An edit is a function from a program and a random draw to a changed copy, or None where the program has no place for it.
What comes out need not be a legal program.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from planted.changes import wrong_edge
from torch import fx

from ingot.ir import build, ops
from ingot.ir.program import Program, Region, RegionCall, Stage, target_of
from ingot.ir.recipe import Recipe, affine
from ingot.ir.types import Dim, Split, TensorType

Edit = Callable[[Program, random.Random], Program | None]

# Ops that take the same arguments and mean something else.
_OTHER_OP: Mapping[str, str] = {
    "aten.add.Tensor": "aten.mul.Tensor",
    "aten.mul.Tensor": "aten.add.Tensor",
    "ingot.silu_mul": "ingot.gelu_mul",
    "ingot.gelu_mul": "ingot.silu_mul",
}
_FLOATS = ("eps", "scale", "cap", "soft_cap", "limit")
_NUMBERED = ("layer", "page_size", "parts", "mask")


def _pick(found: list[Any], draw: random.Random) -> Any:
    return draw.choice(found) if found else None


def _calls(program: Program) -> list[fx.Node]:
    return [node for node in program.calls() if isinstance(node.target, torch._ops.OpOverload)]


def another_op(program: Program, draw: random.Random) -> Program | None:
    changed = program.copy()
    others = {target_of(name): target_of(other) for name, other in _OTHER_OP.items()}
    node = _pick([node for node in _calls(changed) if node.target in others], draw)
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
            for node in _calls(changed)
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
    found = [node for node in _calls(changed) if node.target in views and len(set(node.args[1][-2:])) == 2]
    if not found:
        return None
    node = draw.choice(found)
    *front, last, end = node.args[1]
    node.args = (node.args[0], [*front, end, last])
    return changed


def another_slice(program: Program, draw: random.Random) -> Program | None:
    changed = program.copy()
    node = _pick([node for node in _calls(changed) if node.target is torch.ops.aten.slice.Tensor], draw)
    if node is None:
        return None
    source, dim, begin, end = node.args
    node.args = (source, dim, begin + 1, end + 1)
    return changed


def another_cast(program: Program, draw: random.Random) -> Program | None:
    changed = program.copy()
    node = _pick([node for node in _calls(changed) if node.target is ops.cast.overload], draw)
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
        for node in _calls(changed)
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
    node = _pick([one for one in changed.calls(ops.linear.overload) if len(one.args) == 3], draw)
    if node is None:
        return None
    node.args = node.args[:2]
    return changed


def left_out(program: Program, draw: random.Random) -> Program | None:
    """A call is passed by: its readers read what it read."""
    changed = program.copy()
    found = [
        (node, source)
        for node in _calls(changed)
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
        for node in _calls(changed)
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


def another_recipe(program: Program, draw: random.Random) -> Program | None:
    """A step of a param's recipe has another attribute, reads another tensor, or follows."""
    changed = program.copy()
    if not changed.params:
        return None
    name = draw.choice(list(changed.params))
    spec = changed.params[name]
    changed.params[name] = replace(spec, recipe=_edited_recipe(spec.recipe, draw))
    return changed


def _edited_recipe(recipe: Recipe, draw: random.Random) -> Recipe:
    if recipe.inputs and draw.random() < 0.7:
        place = draw.randrange(len(recipe.inputs))
        inputs = list(recipe.inputs)
        inputs[place] = _edited_recipe(inputs[place], draw)
        return replace(recipe, inputs=tuple(inputs))
    if len(recipe.inputs) > 1 and recipe.inputs[0] != recipe.inputs[-1] and draw.random() < 0.3:
        return replace(recipe, inputs=recipe.inputs[::-1])
    found = [(name, value) for name, value in recipe.attrs if isinstance(value, int | float | str)]
    if not found or draw.random() < 0.3:
        return affine(recipe, draw.choice([0.5, 1.0, 2.0]), draw.choice([0.0, 1.0]))
    name, value = draw.choice(found)
    other = f"{value}.x" if isinstance(value, str) else value + 1
    return replace(recipe, attrs=tuple((key, other if key == name else old) for key, old in recipe.attrs))


def _other_type(found: TensorType, draw: random.Random) -> TensorType:
    kind = draw.choice(["dtype", "shape", "strides"])
    if kind == "shape" and found.shape and isinstance(found.shape[-1], int):
        return TensorType(found.dtype, (*found.shape[:-1], found.shape[-1] + 1))
    if kind == "strides" and len(found.shape) > 1:
        strides = tuple(range(3, 3 + len(found.shape)))
        return TensorType(found.dtype, found.shape, strides)
    return TensorType(torch.float64 if found.dtype is not torch.float64 else torch.int32, found.shape, found.strides)


def another_input_type(program: Program, draw: random.Random) -> Program | None:
    changed = program.copy()
    node = draw.choice(list(changed.placeholders("input")))
    node.meta = {**node.meta, "type": _other_type(node.meta["type"], draw)}
    return changed


def another_param_type(program: Program, draw: random.Random) -> Program | None:
    changed = program.copy()
    node = draw.choice(list(changed.placeholders("param")))
    spec = changed.params[str(node.target)]
    changed.params[str(node.target)] = spec = replace(spec, type=_other_type(spec.type, draw))
    node.meta = {**node.meta, "type": spec.type}
    return changed


def another_result_type(program: Program, draw: random.Random) -> Program | None:
    """A call declares another dtype, shape or strides than it has."""
    changed = program.copy()
    found = [node for node in _calls(changed) if isinstance(node.meta["type"], TensorType)]
    node = draw.choice(found)
    node.meta = {**node.meta, "type": _other_type(node.meta["type"], draw)}
    return changed


def another_placement(program: Program, draw: random.Random) -> Program | None:
    changed = program.copy()
    name = draw.choice(list(changed.params))
    spec = changed.params[name]
    split = Split("tp", len(spec.type.shape) - 1, (1, 2))
    changed.params[name] = replace(spec, split=None if spec.split and draw.random() < 0.5 else split)
    return changed


def another_result_placement(program: Program, draw: random.Random) -> Program | None:
    changed = program.copy()
    node = _pick([node for node in _calls(changed) if node.meta.get("placement")], draw)
    if node is None:
        return None
    node.meta = {**node.meta, "placement": ()}
    return changed


def another_call_backend(program: Program, draw: random.Random) -> Program | None:
    changed = program.copy()
    node = _pick([node for node in _calls(changed) if node.meta.get("backend")], draw)
    if node is None:
        return None
    node.meta = {**node.meta, "backend": "cpu" if node.meta["backend"] != "cpu" else "reference"}
    return changed


def _region_of(program: Program, draw: random.Random) -> Region | None:
    found: Region | None = _pick(list(program.regions.values()), draw)
    return found


def another_region_backend(program: Program, draw: random.Random) -> Program | None:
    changed = program.copy()
    region = _region_of(changed, draw)
    if region is None:
        return None
    changed.regions[region.name] = replace(region, backend="tensorrt")
    for node in changed.calls(RegionCall(region.name)):
        node.meta = {**node.meta, "backend": "tensorrt"}
    return changed


def another_body(program: Program, draw: random.Random) -> Program | None:
    """A region computes something else."""
    changed = program.copy()
    region = _region_of(changed, draw)
    if region is None:
        return None
    edits = [another_op, another_scale, another_view, another_slice, another_cast, swapped_arguments, another_value]
    draw.shuffle(edits)
    for edit in edits:
        body = edit(region.body, draw)
        if body is not None:
            changed.regions[region.name] = replace(region, body=body)
            return changed
    return None


def another_result(program: Program, draw: random.Random) -> Program | None:
    """A region gives another of its values."""
    changed = program.copy()
    region = _region_of(changed, draw)
    if region is None:
        return None
    body = region.body.copy()
    outputs = body.output_nodes()
    name = draw.choice(list(outputs))
    tensors = [node for node in body.calls() if isinstance(node.meta["type"], TensorType)]
    others = [node for node in tensors if node not in outputs.values()]
    if not others:
        return None
    body.set_outputs({**outputs, name: draw.choice(others)})
    changed.regions[region.name] = replace(region, body=body)
    return changed


def dissolved_region(program: Program, draw: random.Random) -> Program | None:
    """One call of a region becomes the calls of its body."""
    changed = program.copy()
    node = _pick(_region_calls(changed), draw)
    if node is None:
        return None
    region = changed.regions[node.target.name]
    inner = dict(zip(region.body.placeholders(), node.args, strict=True))
    with changed.graph.inserting_before(node):
        for call in region.body.calls():
            inner[call] = changed.graph.node_copy(call, inner.__getitem__)
            inner[call].meta["backend"] = region.backend
    results = [inner[result] for result in region.body.output_nodes().values()]
    if len(results) == 1:
        node.replace_all_uses_with(results[0])
    else:
        for user in list(node.users):
            user.replace_all_uses_with(results[user.args[1]])
            changed.graph.erase_node(user)
    changed.graph.erase_node(node)
    if not list(changed.calls(RegionCall(region.name))):
        del changed.regions[region.name]
    return changed


def another_stage(program: Program, draw: random.Random) -> Program | None:
    changed = program.copy()
    changed.stage = draw.choice([stage for stage in Stage if stage is not program.stage])
    return changed


def another_bound(program: Program, draw: random.Random) -> Program | None:
    changed = program.copy()
    dim = draw.choice(list(changed.dims.values()))
    changed.dims[dim.name] = Dim(dim.name, dim.lo, dim.hi + 1)
    return changed


def another_bucket(program: Program, draw: random.Random) -> Program | None:
    changed = program.copy()
    if changed.bucket is None:
        return None
    update = draw.choice([{"tokens": (1, 9)}, {"q_max": 3}, {"features": ("spec",)}])
    changed.bucket = changed.bucket.model_copy(update=update)
    return changed


def another_mesh(program: Program, draw: random.Random) -> Program | None:
    changed = program.copy()
    changed.mesh = {"tp": changed.mesh.get("tp", 1) * 2}
    return changed


def another_state(program: Program, draw: random.Random) -> Program | None:
    changed = program.copy()
    if not changed.states:
        return None
    name = draw.choice(list(changed.states))
    spec = changed.states[name]
    changes: list[dict[str, Any]] = [
        {"kind": "other"},
        {"group": "other"},
        {"unit": "token" if spec.unit == "sequence" else "sequence"},
        {"type": _other_type(spec.type, draw)},
    ]
    changed.states[name] = replace(spec, **draw.choice(changes))
    return changed


def another_output(program: Program, draw: random.Random) -> Program | None:
    """An output is missing, is called otherwise, or is another value."""
    changed = program.copy()
    outputs = changed.output_nodes()
    name = draw.choice(list(outputs))
    value = outputs.pop(name)
    match draw.choice(["missing", "name", "value"]):
        case "name":
            outputs["renamed"] = value
        case "value":
            tensors = [node for node in changed.calls() if isinstance(node.meta["type"], TensorType)]
            outputs[name] = draw.choice([node for node in tensors if node is not value])
    if not outputs:
        return None
    changed.set_outputs(outputs)
    return changed


def one_more(program: Program, draw: random.Random) -> Program | None:
    """An input that nothing reads."""
    changed = program.copy()
    changed.add_input("more", TensorType(torch.float32, ("T",)))
    return changed


def twice(program: Program, draw: random.Random) -> Program | None:
    """A call is made a second time, for one of its readers; no write of a state, which can be made once."""
    return _twice(program, lambda one: [node for node in _calls(one) if not _writes(node)], draw)


def region_twice(program: Program, draw: random.Random) -> Program | None:
    """A region is called a second time, for one of the readers."""
    return _twice(program, _region_calls, draw)


def _writes(node: fx.Node) -> bool:
    op = ops.op_of(node.target)
    return op is not None and bool(op.states)


def _region_calls(program: Program) -> list[fx.Node]:
    return [node for node in program.calls() if isinstance(node.target, RegionCall)]


def _twice(program: Program, calls: Callable[[Program], list[fx.Node]], draw: random.Random) -> Program | None:
    changed = program.copy()
    node = _pick([node for node in calls(changed) if len(node.users) > 1], draw)
    if node is None:
        return None
    with changed.graph.inserting_after(node):
        again = changed.graph.node_copy(node, lambda one: one)
    draw.choice(list(node.users)).replace_input_with(node, again)
    return changed


EDITS: tuple[Edit, ...] = (
    another_op,
    another_scale,
    another_number,
    another_view,
    another_slice,
    another_cast,
    swapped_arguments,
    another_value,
    another_region_argument,
    dropped_bias,
    left_out,
    put_in,
    another_recipe,
    another_input_type,
    another_param_type,
    another_result_type,
    another_placement,
    another_result_placement,
    another_call_backend,
    another_region_backend,
    another_body,
    another_result,
    dissolved_region,
    another_stage,
    another_bound,
    another_bucket,
    another_mesh,
    another_state,
    another_output,
    one_more,
    twice,
    region_twice,
)
