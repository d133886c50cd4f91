"""Placement rules: for each op, how its arguments must lie on an axis of the mesh, and how its result then does.

A rule looks at one axis at a time. On an axis a value is split (`Placement` of kind shard), a sum that is still due
(partial), or the same on every rank, for which the rules write None.
"""

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from ingot.ir.errors import VerifyError
from ingot.ir.ops import op_of
from ingot.ir.program import Program, RegionCall, target_name
from ingot.ir.types import Placement, Size, StateType, TensorType, TupleType

Spot = Placement | None
Placements = tuple[Placement, ...]
Look = Callable[[fx.Node], Placements]


@dataclass(frozen=True)
class Call:
    """A call as one axis sees it: its arguments by parameter name; spots and types of those that are values.

    Types are those of a rank; a state's is that of its spec.
    """

    values: Mapping[str, Any]
    at: Mapping[str, Spot]
    types: Mapping[str, TensorType]
    result: Any
    axis: str
    parts: int

    def shard(self, dim: int, segments: tuple[int, ...] = ()) -> Placement:
        return Placement(self.axis, "shard", dim, segments)

    @property
    def partial(self) -> Placement:
        return Placement(self.axis, "partial")

    def kind(self, name: str) -> str:
        spot = self.at.get(name)
        return spot.kind if spot is not None else "replicated"

    def is_shard(self, name: str, dim: int) -> bool:
        return self.at.get(name) == self.shard(dim)

    def size(self, name: str, dim: int) -> Size:
        return self.types[name].shape[dim]


@dataclass(frozen=True)
class Fit:
    """What a rule says: the spot that each argument must have (replicated where none is named), and the results'."""

    needs: Mapping[str, Spot] = field(default_factory=dict)
    result: Spot | tuple[Spot, ...] = None


Rule = Callable[[Call], Fit]


def _whole(call: Call) -> Fit:
    """Every rank has all of everything."""
    return Fit()


def _elementwise(call: Call) -> Fit:
    """All arguments split alike, counted from the last axis, as broadcasting does."""
    ranks = {name: len(value_type.shape) for name, value_type in call.types.items()}
    split = {name: spot for name, spot in call.at.items() if spot is not None and spot.kind == "shard"}
    places = {(spot.dim - ranks[name], spot.segments) for name, spot in split.items()}
    if len(places) != 1:
        return _whole(call)
    dim, segments = places.pop()
    for name in call.types.keys() - split.keys():
        if ranks[name] >= -dim and call.size(name, dim) != 1:
            return _whole(call)  # one that is whole along the split axis
    return Fit(split, call.shard(max(ranks.values()) + dim, segments))


def _sum(call: Call) -> Fit:
    """A sum of partial sums is a partial sum."""
    if len(call.types) == 2 and all(call.kind(name) == "partial" for name in call.types):
        return Fit(call.at, call.partial)
    return _elementwise(call)


def _product(call: Call) -> Fit:
    """A multiple of a partial sum by a constant is one too."""
    if len(call.types) == 1 and all(call.kind(name) == "partial" for name in call.types):
        return Fit(call.at, call.partial)
    return _elementwise(call)


def _linear(call: Call) -> Fit:
    """A weight split by rows gives a split result; one split by columns takes a split x and gives partial sums."""
    weight = call.at["weight"]
    last = len(call.types["x"].shape) - 1
    if weight is not None and weight.kind == "shard" and weight.dim == 0:
        bias = {"bias": weight} if "bias" in call.types else {}
        return Fit({"weight": weight, **bias}, call.shard(last, weight.segments))
    if weight == call.shard(1):
        if "bias" in call.types:
            raise VerifyError("a bias on partial sums is added once by each rank", expected="an add behind the sum")
        return Fit({"weight": weight, "x": call.shard(last)}, call.partial)
    return _whole(call)


def _norm(call: Call) -> Fit:
    """Over the last axis, so any other may be split; gains of one row for each head are split with the heads."""
    x = call.at["x"]
    if len(call.types["weight"].shape) == 2:
        if call.is_shard("x", 1) or call.is_shard("weight", 0):
            return Fit({"x": call.shard(1), "weight": call.shard(0)}, call.shard(1))
        return _whole(call)
    if x is not None and x.kind == "shard" and x.dim < len(call.types["x"].shape) - 1:
        return Fit({"x": x}, x)
    return _whole(call)


def _rope(call: Call) -> Fit:
    return Fit({"x": call.shard(1)}, call.shard(1)) if call.is_shard("x", 1) else _whole(call)


def _select_rows(call: Call) -> Fit:
    x = call.at["x"]
    return Fit({"x": x}, x) if x is not None and (x.kind == "partial" or x.dim > 0) else _whole(call)


def _by_heads(call: Call, dims: Mapping[str, int], result: Spot | tuple[Spot, ...]) -> Fit:
    """Attention and what leads to it: all arguments in `dims` split by heads, or none."""
    given = {name: dim for name, dim in dims.items() if name in call.types}
    if not any(call.is_shard(name, dim) for name, dim in given.items()):
        return _whole(call)
    return Fit({name: call.shard(dim) for name, dim in given.items()}, result)


def _attention(call: Call) -> Fit:
    fit = _by_heads(call, {"q": 1, "k": 1, "v": 1, "sinks": 0}, call.shard(1))
    if fit.needs and all(call.at[name] == fit.needs[name] for name in ("q", "k")):
        heads, kv_heads = call.size("q", 1), call.size("k", 1)
        assert isinstance(heads, int) and isinstance(kv_heads, int)
        if heads % kv_heads:
            raise VerifyError(f"a rank has {heads} heads of q for {kv_heads} of k and v", expected="a multiple")
    return fit


def _kv_append(call: Call) -> Fit:
    return _by_heads(call, {"kv": 3, "k": 1, "v": 1}, call.shard(3))


def _paged_attention(call: Call) -> Fit:
    return _by_heads(call, {"q": 1, "kv": 3, "sinks": 0}, call.shard(1))


def _qk_norm_rope_append(call: Call) -> Fit:
    return _by_heads(call, {"kv": 3, "q": 1, "k": 1, "v": 1}, (call.shard(1), call.shard(3)))


def _view(call: Call) -> Fit:
    x = call.at["x"]
    if x is None or x.kind == "partial":
        return Fit({"x": x}, x)
    found = viewed_dim(call.types["x"].shape, call.result.shape, x.dim)
    if found is None or (x.segments and call.size("x", x.dim) != call.result.shape[found]):
        return _whole(call)
    return Fit({"x": x}, call.shard(found, x.segments))


def viewed_dim(shape: tuple[Size, ...], viewed: tuple[Size, ...], dim: int) -> int | None:
    """Where a part along `dim` of `shape` lies in a view of it: the axis of `viewed`; None where it is torn apart.

    Axes that a view splits or joins form a group of equal size on both sides; a part stays one where the split axis is
    the outermost of its group.
    """
    i = j = 0
    while i < len(shape) and j < len(viewed):
        first, left, right = (i, j), shape[i], viewed[j]
        i, j = i + 1, j + 1
        while left != right:
            if isinstance(left, str) or isinstance(right, str):
                return None
            if left < right:
                if i == len(shape) or isinstance(size := shape[i], str):
                    return None
                left, i = left * size, i + 1
            else:
                if j == len(viewed) or isinstance(size := viewed[j], str):
                    return None
                right, j = right * size, j + 1
        if dim < i:
            return first[1] if dim == first[0] else None
    return None


def _slice(call: Call) -> Fit:
    """Along a split axis only whole segments can be taken."""
    x, values = call.at["x"], call.values
    if x is None or x.kind == "partial" or x.dim != values["dim"]:
        return Fit({"x": x}, x)
    bounds = [0]
    for segment in x.segments:
        bounds.append(bounds[-1] + segment // call.parts)
    if values["step"] != 1 or values["start"] not in bounds or values["end"] not in bounds:
        return _whole(call)
    kept = x.segments[bounds.index(values["start"]) : bounds.index(values["end"])]
    return Fit({"x": x}, call.shard(x.dim, kept if len(kept) > 1 else ()))


def _collective(source: str = "", target: str = "") -> Rule:
    """From one kind of placement to another along the op's own axis, by its `src` and `dst` where it has them; along
    others it changes nothing."""

    def rule(call: Call) -> Fit:
        if call.values["axis"] != call.axis:
            return Fit({"x": call.at["x"]}, call.at["x"])
        _check_parts(call)
        spots = {
            "replicated": None,
            "partial": call.partial,
            "shard": call.shard(call.values.get("dim", 0)),
        }
        return Fit({"x": spots[call.values.get("src", source)]}, spots[call.values.get("dst", target)])

    return rule


def _check_parts(call: Call) -> None:
    if call.values.get("parts", call.parts) != call.parts:
        raise VerifyError(f"{call.values['parts']} parts on axis {call.axis}", expected=f"{call.parts}, its size")


def _vocab_embedding(call: Call) -> Fit:
    if call.values["axis"] != call.axis:
        return _whole(call)
    _check_parts(call)
    return Fit({"weight": call.shard(0)}, call.partial)


# By printed name. An op of another package takes and gives whole values.
RULES: Mapping[str, Rule] = {
    "aten.add.Tensor": _sum,
    "aten.mul.Tensor": _product,
    "aten.slice.Tensor": _slice,
    "aten.view.default": _view,
    "ingot.add_rms_norm": _whole,
    "ingot.advance": _whole,
    "ingot.all_gather": _collective("shard", "replicated"),
    "ingot.all_reduce": _collective("partial", "replicated"),
    "ingot.attention": _attention,
    "ingot.cast": _elementwise,
    "ingot.embedding": _whole,
    "ingot.feed": _whole,
    "ingot.gelu_mul": _elementwise,
    "ingot.kv_append": _kv_append,
    "ingot.layer_norm": _norm,
    "ingot.linear": _linear,
    "ingot.paged_attention": _paged_attention,
    "ingot.qk_norm_rope_append": _qk_norm_rope_append,
    "ingot.redistribute": _collective(),
    "ingot.reduce_scatter": _collective("partial", "shard"),
    "ingot.rms_norm": _norm,
    "ingot.rope": _rope,
    "ingot.sample": _whole,
    "ingot.select_rows": _select_rows,
    "ingot.silu_mul": _elementwise,
    "ingot.soft_cap": _elementwise,
    "ingot.take_part": _collective("replicated", "shard"),
    "ingot.vocab_embedding": _vocab_embedding,
}
# The parameters of aten's ops, with what their calls leave out.
_ATEN_PARAMETERS: Mapping[str, Mapping[str, Any]] = {
    "aten.add.Tensor": {"x": None, "other": None, "alpha": 1},
    "aten.mul.Tensor": {"x": None, "other": None},
    "aten.slice.Tensor": {"x": None, "dim": 0, "start": None, "end": None, "step": 1},
    "aten.view.default": {"x": None, "size": None},
}


def placement_of(node: fx.Node, program: Program) -> Placements:
    """Where a value lies, axes on which it is replicated left out. A tuple has no placement, its items do."""
    if node.op != "placeholder":
        found: Placements = node.meta.get("placement", ())
        return found
    kind, name = node.meta["kind"], str(node.target)
    spec = program.params[name] if kind == "param" else program.states[name] if kind == "state" else None
    return tuple(place for place in spec.placement if place.kind != "replicated") if spec is not None else ()


def fit(node: fx.Node, program: Program, axis: str, look: Look | None = None) -> Fit:
    """What the rule of the node's op says on `axis`, given where its arguments lie."""
    look = look or (lambda value: placement_of(value, program))
    name, named = target_name(node.target), _arguments(node)
    nodes = {key: value for key, value in named.items() if isinstance(value, fx.Node)}
    types = {
        key: program.states[value.meta["type"].name].type
        if isinstance(value.meta["type"], StateType)
        else value.meta["type"]
        for key, value in nodes.items()
    }
    at = {key: _spot(look(value), axis) for key, value in nodes.items()}
    call = Call(named, at, types, node.meta["type"], axis, program.mesh[axis])
    try:
        return RULES.get(name, _whole)(call)
    except VerifyError as error:
        raise VerifyError(f"{name} on axis {axis}: {error.what}", expected=error.expected) from error


def infer_placement(node: fx.Node, program: Program) -> Placements:
    """Where the result of a call lies, given where its arguments do. VerifyError when its op cannot take them so."""
    if isinstance(node.meta["type"], TupleType):
        _results(node, program, lambda value: placement_of(value, program))
        return ()
    return _results(node, program, lambda value: placement_of(value, program))[0]


def _results(node: fx.Node, program: Program, look: Look) -> tuple[Placements, ...]:
    """Placements of each result of a call."""
    if node.target is operator.getitem:
        whole, index = node.args
        assert isinstance(whole, fx.Node) and isinstance(index, int)
        return (_results(whole, program, look)[index],)
    if isinstance(node.target, RegionCall):
        return _region_results(node, program, look)
    count = len(node.meta["type"].items) if isinstance(node.meta["type"], TupleType) else 1
    results: list[list[Placement]] = [[] for _ in range(count)]
    for axis in program.mesh:
        found = fit(node, program, axis, look)
        _check_needs(node, found, axis, look)
        spots = found.result if isinstance(found.result, tuple) else (found.result,) * count
        for result, spot in zip(results, spots, strict=True):
            if spot is not None:
                result.append(spot)
    return tuple(tuple(result) for result in results)


def _region_results(node: fx.Node, program: Program, look: Look) -> tuple[Placements, ...]:
    """A region's body knows nothing of a mesh: the rules go through it with the placements of this call."""
    assert isinstance(node.target, RegionCall)
    body = program.regions[node.target.name].body
    known: dict[fx.Node, Placements] = {}
    for inner, outer in zip(body.placeholders(), node.args, strict=True):
        assert isinstance(outer, fx.Node)
        known[inner] = look(outer)
    on_mesh = Program(body.name, body.stage, body.dims, mesh=program.mesh)
    for inner in body.calls():
        if not isinstance(inner.meta["type"], TupleType):
            known[inner] = _results(inner, on_mesh, known.__getitem__)[0]
    return tuple(known[inner] for inner in body.output_nodes().values())


def _check_needs(node: fx.Node, found: Fit, axis: str, look: Look) -> None:
    for name, value in _arguments(node).items():
        if isinstance(value, fx.Node) and (at := _spot(look(value), axis)) != found.needs.get(name):
            raise VerifyError(
                f"{target_name(node.target)} is given '{name}' as {spot_text(at, axis)}",
                expected=spot_text(found.needs.get(name), axis),
                hint="a collective is missing in front of it",
            )


def _arguments(node: fx.Node) -> dict[str, Any]:
    """Arguments by parameter name, the absent ones that default to None left out."""
    op = op_of(node.target)
    if op is not None:
        return {name: value for name, value in op.bind(node.args, dict(node.kwargs)).items() if value is not None}
    parameters = _ATEN_PARAMETERS[target_name(node.target)]
    return {**parameters, **dict(zip(parameters, node.args, strict=False)), **node.kwargs}


def _spot(placements: Placements, axis: str) -> Spot:
    return next((place for place in placements if place.axis == axis), None)


def spot_text(spot: Spot, axis: str) -> str:
    return f"{axis}=replicated" if spot is None else str(spot)


def cache_placement(keys: Placements) -> Placements:
    """Where a cache [pages, 2, page, kv_heads, head_dim] of keys [T, kv_heads, head_dim] lies."""
    return tuple(Placement(place.axis, "shard", 3) for place in keys if place.kind == "shard" and place.dim == 1)


def check_param(name: str, program: Program) -> None:
    """That a param's placement names axes of the mesh and splits its whole, and that its recipe makes that part."""
    spec = program.params[name]
    recipe = spec.recipe
    for place in reversed(spec.placement):
        _check_place(place, spec.type, program)
        if place.kind == "partial":
            raise VerifyError(f"a param cannot be {place}", expected="replicated or shard")
        if place.kind != "shard":
            continue
        size, parts = spec.type.shape[place.dim], program.mesh[place.axis]
        assert isinstance(size, int)
        if place.segments and (sum(place.segments) != size * parts or any(part % parts for part in place.segments)):
            raise VerifyError(
                f"{place} of {spec.type} over {parts} ranks",
                expected=f"multiples of {parts} that sum to {size * parts}",
            )
        wanted = {"axis": place.axis, "dim": place.dim, "segments": place.segments}
        found = dict(recipe.attrs) if recipe.step == "shard" else {}
        if found != wanted:
            raise VerifyError(f"the recipe does not end in the shard of {place}", expected=f"shard(…, {wanted})")
        recipe = recipe.inputs[0]
    if recipe.step == "shard":
        raise VerifyError("the recipe shards more than the placement says", expected="as many shards as splits")


def _check_place(place: Placement, value_type: TensorType, program: Program) -> None:
    if place.axis not in program.mesh:
        raise VerifyError(f"the mesh has no axis '{place.axis}'", expected=", ".join(program.mesh))
    if place.kind == "shard" and not (0 <= place.dim < len(value_type.shape)):
        raise VerifyError(f"{place} of {value_type}", expected=f"one of {len(value_type.shape)} axes")


def check_state(name: str, program: Program) -> None:
    """That a state's placement names axes of the mesh and of the state."""
    spec = program.states[name]
    for place in spec.placement:
        _check_place(place, spec.type, program)
        if place.kind == "partial":
            raise VerifyError(f"a state cannot be {place}", expected="replicated or shard")
