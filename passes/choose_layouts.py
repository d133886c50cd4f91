"""choose-layouts: chooses one memory layout per weight, by the cost over all bucket classes."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from ingot.ir.artifact.plan import BucketClass
from ingot.ir.artifact.record import Numerics
from ingot.ir.backend import Claim, Yes, alternatives
from ingot.ir.layout import TRANSPOSE, TRANSPOSED, Layout
from ingot.ir.ops import linear
from ingot.ir.program import ParamSpec, Program, held_type, is_call, named_arguments
from ingot.ir.recipe import Recipe, permute
from ingot.ir.types import Placement, TensorType
from ingot.passes.base import Pass, PassContext
from ingot.passes.rewrite import Rewriter

# The identity of a resident tensor: params with equal recipe, placement and type share one.
Tensor = tuple[Recipe, tuple[Placement, ...], TensorType]
_BY_COLUMNS = ".transposed"  # suffix of the name of a param that is the column-major copy of another
Costs = Mapping[str, Mapping[Layout, float]]  # by bucket class


@dataclass(frozen=True)
class SecondCopy:
    """A weight that is in memory in two layouts.

    first    name of the row-major param
    second   name of the column-major param
    bytes    size of one copy
    """

    first: str
    second: str
    bytes: int


def second_copies(params: Mapping[str, ParamSpec]) -> tuple[SecondCopy, ...]:
    """Return the weights that are in memory both row-major and column-major.

    `params` maps names to the params of all bucket classes (ranges of step sizes).
    """
    by_rows = {spec.recipe: name for name, spec in params.items()}
    found = [
        SecondCopy(by_rows[spec.recipe.inputs[0]], name, _size(_tensor(spec)))
        for name, spec in params.items()
        if name.endswith(_BY_COLUMNS) and spec.recipe.inputs[0] in by_rows
    ]
    return tuple(found)


@dataclass(frozen=True)
class ChooseLayouts(Pass):
    """Chooses row-major or column-major storage for each weight [N, K] of linears.

    Weights that other ops read too, such as a tied embedding, stay as they are. A layout's cost is the sum of the
    lowest costs of backends, over all linears that read the weight and all bucket classes (ranges of step sizes). If
    the classes prefer different layouts, a weight may be stored in both. `weight_budget` limits the bytes of all
    weights. The weights with the largest savings per byte get a second copy first.

    The pass runs once for each bucket class and changes only the program of that class. It looks at all classes each
    time, so every run makes the same choice.
    """

    name: ClassVar[str] = "choose-layouts"
    numerics: ClassVar[Numerics] = Numerics.ROUNDING

    def run(self, rewriter: Rewriter, context: PassContext) -> None:
        program = rewriter.program
        assert context.bucket is not None
        for tensor, chosen in _choose(program, context).items():
            if chosen[context.bucket.name] is Layout.COLUMN_MAJOR:
                for name in [name for name, spec in program.params.items() if _tensor(spec) == tensor]:
                    param = program.find(name)
                    if rewriter.take(param):
                        _transpose(rewriter, param)


def _tensor(spec: ParamSpec) -> Tensor:
    return spec.recipe, spec.placement, spec.type


def _size(tensor: Tensor) -> int:
    return math.prod(tensor[2].bind({})) * tensor[2].dtype.itemsize


def _choose(program: Program, context: PassContext) -> dict[Tensor, dict[str, Layout]]:
    """Choose the layout of each weight in each bucket class (a range of step sizes).

    The result maps each weight to a layout per class name.
    """
    known: dict[object, list[Claim]] = {}
    costs = {tensor: _costs(calls, context, known) for tensor, calls in _candidates(program).items()}
    chosen = {tensor: dict.fromkeys(cost, _cheapest(_sum(cost.values()))) for tensor, cost in costs.items()}
    by_bucket = {tensor: {bucket: _cheapest(one) for bucket, one in cost.items()} for tensor, cost in costs.items()}
    saved = {tensor: _paid(costs[tensor], chosen[tensor]) - _paid(costs[tensor], by_bucket[tensor]) for tensor in costs}
    # Sizes are above 0. The sort is stable: equal savings keep the program's order.
    order = sorted((one for one in saved if saved[one] > 0), key=lambda one: -saved[one] / _size(one))
    room = (context.weight_budget - 1.0) * sum(map(_size, {_tensor(spec) for spec in program.params.values()}))
    for tensor in order:
        if _size(tensor) <= room:
            room -= _size(tensor)
            chosen[tensor] = by_bucket[tensor]
    return chosen


def _candidates(program: Program) -> dict[Tensor, list[fx.Node]]:
    """Return the weights that only linears read, each with these linears."""
    calls: dict[Tensor, list[fx.Node]] = {}
    others: set[Tensor] = set()
    for param in program.placeholders("param"):
        tensor = _tensor(program.params[str(param.target)])
        for user in param.users:
            if is_call(user, linear.overload) and named_arguments(user)["weight"] is param:
                calls.setdefault(tensor, []).append(user)
            else:
                others.add(tensor)
    return {tensor: users for tensor, users in calls.items() if tensor not in others}


def _costs(calls: list[fx.Node], context: PassContext, known: dict[object, list[Claim]]) -> Costs:
    return {
        bucket.name: _sum(_cost(_claims(call, bucket, context, known), context) for call in calls)
        for bucket in context.buckets
    }


def _claims(call: fx.Node, bucket: BucketClass, context: PassContext, known: dict[object, list[Claim]]) -> list[Claim]:
    """Return the claim of each backend for a linear, in steps of one bucket class (a range of step sizes).

    A claim is a cost, or the reason why the backend cannot compute it. `known` caches claims for linears with equal
    types.
    """
    given = named_arguments(call).values()
    types = tuple(held_type(one) if isinstance(one, fx.Node) else one for one in given)
    key = bucket.name, types, call.meta["type"]
    if key not in known:
        known[key] = [backend.claim([call], context.target, bucket) for backend in context.backends]
    return known[key]


def _cost(claims: list[Claim], context: PassContext) -> dict[Layout, float]:
    """Return for each layout of the weight the lowest cost among `claims`, the answers of backends about a linear.

    The cost is infinite if no backend accepts the layout.
    """
    return {layout: min((yes.cost for yes in _taking(claims, layout, context)), default=math.inf) for layout in Layout}


def _taking(claims: list[Claim], layout: Layout, context: PassContext) -> Iterable[Yes]:
    for claim in claims:
        for yes in alternatives(claim):
            if yes.takes({"weight": layout}) and context.counts(yes):
                yield yes


def _sum(costs: Iterable[Mapping[Layout, float]]) -> dict[Layout, float]:
    listed = list(costs)
    return {layout: sum(cost[layout] for cost in listed) for layout in Layout}


def _cheapest(cost: Mapping[Layout, float]) -> Layout:
    """Return the layout with the lowest cost. If the costs are equal, it is row-major."""
    return min(Layout, key=lambda layout: cost[layout])


def _paid(cost: Costs, layouts: Mapping[str, Layout]) -> float:
    return sum(cost[bucket][layout] for bucket, layout in layouts.items())


def _transpose(rewriter: Rewriter, param: fx.Node) -> None:
    """Replace a row-major param by a column-major one. Its readers now read a transposed view of the new param."""
    program = rewriter.program
    name = str(param.target)
    spec = program.params[name]
    rows, columns = spec.type.shape
    held = rewriter.add_param(
        name + _BY_COLUMNS,
        ParamSpec(
            TensorType(spec.type.dtype, (columns, rows)),
            permute(spec.recipe, TRANSPOSED),
            tuple(_turned(place) for place in spec.placement),
            spec.split.turned if spec.split else None,
        ),
    )
    users = list(param.users)
    first = next(node for node in program.calls() if node in users)
    view = rewriter.call(TRANSPOSE, held, list(TRANSPOSED), before=first)
    for user in users:
        user.replace_input_with(param, view)
    rewriter.retype(users)


def _turned(place: Placement) -> Placement:
    if place.kind != "shard":
        return place
    return Placement(place.axis, place.kind, 1 - place.dim, place.segments)
