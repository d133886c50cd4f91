"""merge-linears: linears that read the same value become one, with their weights concatenated by recipe."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from ingot.ir import ops
from ingot.ir.errors import VerifyError
from ingot.ir.mesh import Mesh
from ingot.ir.ops import op_of
from ingot.ir.program import ParamSpec, tensor_type
from ingot.ir.recipe import Recipe, concat, shard
from ingot.ir.record import Numerics
from ingot.ir.schemes import find_scheme
from ingot.ir.types import DTYPE_NAMES, Placement, Split, TensorType, concatenated
from ingot.passes.base import Pass, PassContext
from ingot.passes.rewrite import Rewriter, described, trimmed

# What stands behind x in a call, by the plural: each is concatenated along axis 0, the linear's outputs.
_PARTS: Mapping[Any, Mapping[str, str]] = {
    ops.linear.overload: {"weight": "weights", "bias": "biases"},
    ops.quant_linear.overload: {"weight": "weights", "scales": "scales", "zeros": "zeros", "bias": "biases"},
}


@dataclass(frozen=True)
class MergeLinears(Pass):
    """q, k, v and gate, up: one product instead of three or two, each old result a slice of the new one.

    Part i of the merged weight keeps its own shards, so the placement's segments are the parts' sizes.
    """

    name: ClassVar[str] = "merge-linears"
    numerics: ClassVar[Numerics] = Numerics.ROUNDING

    def run(self, rewriter: Rewriter, context: PassContext) -> None:
        groups: dict[tuple[fx.Node, bool], list[fx.Node]] = {}
        for node in rewriter.program.calls():
            if node.target not in _PARTS:
                continue
            bound = _bound(node)
            groups.setdefault((bound["x"], bound["bias"] is None), []).append(node)
        for linears in groups.values():
            if len(linears) > 1:
                if reason := _why_not_merge(linears):
                    rewriter.refuse(linears[0], reason, by_request=True)
                elif reason := _obstacle(rewriter, linears):
                    rewriter.refuse(linears[0], reason)
                elif rewriter.take(linears[0]):
                    _merge(rewriter, linears)


def _bound(node: fx.Node) -> dict[str, Any]:
    op = op_of(node.target)
    assert op is not None
    return op.bind(node.args, node.kwargs)


def _why_not_merge(linears: list[fx.Node]) -> str | None:
    """Why linears as they are quantized cannot be merged; None when they can.

    What is quantized row by row may be put one above the other: each row keeps its elements, scales and zeros.
    """
    schemes = [str(_bound(node)["scheme"]) for node in linears if node.target == ops.quant_linear.overload]
    if len(schemes) not in (0, len(linears)):
        return f"{len(schemes)} of {len(linears)} are quantized: " + ", ".join(
            f"{_bound(node)['weight'].target} {_bound(node).get('scheme', 'not')}" for node in linears
        )
    if len(set(schemes)) > 1:
        return f"the quantization schemes differ: {', '.join(sorted(set(schemes)))}"
    if schemes and not find_scheme(schemes[0]).row_by_row:
        return f"scheme '{schemes[0]}' has one scale for a whole weight"
    return None


def _obstacle(rewriter: Rewriter, linears: list[fx.Node]) -> str | None:
    """Why these linears cannot be merged; None when they can."""
    program = rewriter.program
    bound = [_bound(node) for node in linears]
    for part, parts in _PARTS[linears[0].target].items():
        params = [item[part] for item in bound if item[part] is not None]
        for param in params:
            if param.op != "placeholder" or param.meta["kind"] != "param":
                return f"%{param.name} is no param but {described(param)}"
            if len(param.users) > 1:
                return f"param '{param.target}' is used elsewhere too: {len(param.users)} times in all"
        if len({tensor_type(param).dtype for param in params}) > 1:
            dtypes = ", ".join(f"{param.target} {DTYPE_NAMES[tensor_type(param).dtype]}" for param in params)
            return f"the {parts} have several dtypes: {dtypes}"
        specs = [program.params[str(param.target)] for param in params]
        if specs and (_merged_placement(specs, program.mesh) is None or _merged_split(specs) is None):
            placed = ", ".join(
                f"{param.target} {spec.split or ' '.join(map(str, spec.placement)) or 'whole'}"
                for param, spec in zip(params, specs, strict=True)
            )
            return f"the {parts} have no common placement along axis 0: {placed}"
    return None


def _merged_placement(specs: list[ParamSpec], mesh: Mesh) -> tuple[Placement, ...] | None:
    """The placement of params concatenated along axis 0, its segments the whole params; None when there is none."""
    if len({spec.placement for spec in specs}) > 1:
        return None
    merged = []
    for place in specs[0].placement:
        if place.kind == "shard" and (place.dim != 0 or place.segments):
            return None
        parts = mesh.get(place.axis, 1)
        sizes = tuple(size * parts for spec in specs for size in spec.type.shape[:1] if isinstance(size, int))
        merged.append(Placement(place.axis, "shard", 0, sizes) if place.kind == "shard" else place)
    return tuple(merged)


def _merged_split(specs: list[ParamSpec]) -> tuple[Split | None] | None:
    """How a mesh would split params concatenated along axis 0, None of it where it would not; None where it cannot."""
    try:
        return (concatenated([spec.split for spec in specs], [int(spec.type.shape[0]) for spec in specs]),)
    except VerifyError:
        return None


def _merge(rewriter: Rewriter, linears: list[fx.Node]) -> None:
    first = linears[0]
    bound = [_bound(node) for node in linears]
    merged_args = [bound[0]["x"]]  # read now: an earlier merge may have put a slice in its place
    for part in _PARTS[first.target]:
        absent = bound[0][part] is None
        merged_args.append(None if absent else _merged_param(rewriter, [item[part] for item in bound]))
    attributes: dict[str, Any] = {"scheme": bound[0]["scheme"]} if "scheme" in bound[0] else {}
    product = rewriter.call(first.target, *trimmed(merged_args), before=first, **attributes)
    users = [user for node in linears for user in node.users]
    parts: list[fx.Node] = []
    begin = 0
    for node in linears:
        width = tensor_type(node).shape[-1]
        assert isinstance(width, int)
        origin = node.meta.get("origin", "")
        parts.append(
            rewriter.call(torch.ops.aten.slice.Tensor, product, 1, begin, begin + width, before=first, origin=origin)
        )
        begin += width
    for node, part_of in zip(linears, parts, strict=True):
        rewriter.replace(node, part_of)
    rewriter.retype(users)


def _merged_param(rewriter: Rewriter, params: list[fx.Node]) -> fx.Node:
    """A param that holds `params` one after the other along axis 0, named after all of them."""
    program = rewriter.program
    names = [str(param.target).split(".") for param in params]
    # layers.0.q.weight, layers.0.k.weight -> layers.0.q_k.weight; a, b -> a_b
    name = ".".join([*names[0][:-2], "_".join(parts[-2:][0] for parts in names), *names[0][1:][-1:]])
    specs = [program.params[str(param.target)] for param in params]
    rows = sum(size for spec in specs for size in spec.type.shape[:1] if isinstance(size, int))
    placement = _merged_placement(specs, program.mesh)
    split = _merged_split(specs)
    assert placement is not None and split is not None
    merged_type = TensorType(specs[0].type.dtype, (rows, *specs[0].type.shape[1:]))
    made = _merged_recipe(specs, placement, program.mesh)
    return rewriter.add_param(name, ParamSpec(merged_type, made, placement, *split))


def _merged_recipe(specs: list[ParamSpec], placement: tuple[Placement, ...], mesh: Mesh) -> Recipe:
    """The params one after the other; on a mesh a rank's part of that, so that the shards stand outside."""
    recipes, split = [spec.recipe for spec in specs], [place for place in placement if place.kind == "shard"]
    for _ in split if mesh else ():
        recipes = [recipe.inputs[0] for recipe in recipes]
    merged = concat(recipes)
    for place in split if mesh else ():
        merged = shard(merged, place.axis, place.dim, place.segments)
    return merged
