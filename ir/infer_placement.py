"""Infer and check how values are distributed over a mesh (replicated, shard, partial), by the rules of the ops."""

import operator
from collections.abc import Callable

from torch import fx

from ingot.ir.errors import VerifyError
from ingot.ir.ops.aten import definition_of
from ingot.ir.placements import Call, Fit, Spot
from ingot.ir.program import Program, RegionCall, named_arguments, named_values, target_name
from ingot.ir.types import Placement, StateType, TensorType, TupleType

Placements = tuple[Placement, ...]
Look = Callable[[fx.Node], Placements]


def placement_of(node: fx.Node, program: Program) -> Placements:
    """Return how a value is distributed over the mesh: one `Placement` per axis on which it is split or a partial sum.

    There is none for an axis on which every rank has the whole value. Empty for a tuple: its items have placements.
    """
    if node.op != "placeholder":
        found: Placements = node.meta.get("placement", ())
        return found
    kind, name = node.meta["kind"], str(node.target)
    spec = program.params[name] if kind == "param" else program.states[name] if kind == "state" else None
    return tuple(place for place in spec.placement if place.kind != "replicated") if spec is not None else ()


def fit(node: fx.Node, program: Program, axis: str, look: Look | None = None) -> Fit:
    """Apply an op's placement rule to a call, on one mesh axis.

    The result holds the placements that the rule needs for the arguments, and the placements of the results. `look`
    returns the placements that an argument's node has now. By default they are read from the program. Raises
    VerifyError if the rule rejects the arguments.
    """
    look = look or (lambda value: placement_of(value, program))
    op, named = definition_of(node.target), named_arguments(node)
    assert op is not None
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
        return op.placement(call)
    except VerifyError as error:
        place = f"{target_name(node.target)} on axis {axis}"
        raise VerifyError(f"{place}: {error.what}", expected=error.expected) from error


def infer_placement(node: fx.Node, program: Program) -> Placements:
    """Return how the result of a call is distributed over the mesh, by the placement rule of its op.

    There is one `Placement` per axis on which the result is split or a partial sum. Empty for a tuple: its items have
    placements. Raises VerifyError if the op does not accept the placements of its arguments.
    """
    if isinstance(node.meta["type"], TupleType):
        _results(node, program, lambda value: placement_of(value, program))
        return ()
    return _results(node, program, lambda value: placement_of(value, program))[0]


def _results(node: fx.Node, program: Program, look: Look) -> tuple[Placements, ...]:
    """Return the placements of each result of a call. `look` returns the placements of an argument's node."""
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
    """Return how the results of a region's call are distributed over the mesh: the placements of each result.

    A region is a set of calls that are compiled together. The placements are inferred call by call, because the nodes
    inside a region have none. `look` returns the placements of an argument's node.
    """
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
    for name, value in named_values(node).items():
        if (at := _spot(look(value), axis)) != found.needs.get(name):
            raise VerifyError(
                f"{target_name(node.target)} is given '{name}' as {spot_text(at, axis)}",
                expected=spot_text(found.needs.get(name), axis),
                hint="insert a collective before it",
            )


def _spot(placements: Placements, axis: str) -> Spot:
    return next((place for place in placements if place.axis == axis), None)


def spot_text(spot: Spot, axis: str) -> str:
    return f"{axis}=replicated" if spot is None else str(spot)


def cache_placement(keys: Placements) -> Placements:
    """Return how a KV cache is split over the mesh, if its keys have the placements `keys`.

    If the keys [T, kv_heads, head_dim] are split by heads on a mesh axis, the cache [pages, parts, page, kv_heads, row]
    is split by heads on this axis too.
    """
    return tuple(Placement(place.axis, "shard", 3) for place in keys if place.kind == "shard" and place.dim == 1)


def check_param(name: str, program: Program) -> None:
    """Raise VerifyError if the placement of the param `name` does not fit the mesh, the param's type or its recipe.

    The recipe makes the param from checkpoint tensors. It must end in one shard step for each axis that splits the
    param, with equal axis, dim and segments.
    """
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
    """Raise VerifyError if the placement of the state `name` is invalid.

    It may split the state along axes of its tensor, over axes of the mesh. It must not be a partial sum.
    """
    spec = program.states[name]
    for place in spec.placement:
        _check_place(place, spec.type, program)
        if place.kind == "partial":
            raise VerifyError(f"a state cannot be {place}", expected="replicated or shard")
