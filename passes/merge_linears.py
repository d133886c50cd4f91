"""merge-linears: merges linears that read the same value, and concatenates their weights by recipe."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx

from ingot.ir.artifact.record import Numerics
from ingot.ir.errors import VerifyError
from ingot.ir.formats import SHARED_PARTS, Format, named
from ingot.ir.mesh import Mesh
from ingot.ir.program import ParamSpec, Program, tensor_type
from ingot.ir.recipe import Recipe, concat, repeat, shard
from ingot.ir.types import DTYPE_NAMES, Placement, Split, TensorType, concatenated
from ingot.ir.weights import Matmul, StoredWeight, matmul_of
from ingot.passes.base import Pass, PassContext
from ingot.passes.rewrite import Rewriter, described

# The tensors of linears that are concatenated along axis 0, the outputs, with their plurals for messages.
_PLURALS = {
    "weight": "weights",
    "scales": "scales",
    "zeros": "zeros",
    "offsets": "offsets",
    "outer": "outer scales",
    "bias": "biases",
}


@dataclass(frozen=True)
class MergeLinears(Pass):
    """Replaces linears that read the same value, such as q, k and v, by one matmul with concatenated weights.

    Each old result becomes a slice of the new result. On a mesh, each concatenated weight is sharded by itself. So the
    placement of the merged weight lists the sizes of its parts (segments). Weights that a mesh splits are not merged
    with weights that stay whole, such as a router's.
    """

    name: ClassVar[str] = "merge-linears"
    numerics: ClassVar[Numerics] = Numerics.ROUNDING

    def run(self, rewriter: Rewriter, context: PassContext) -> None:
        groups: dict[tuple[fx.Node, bool], list[fx.Node]] = {}
        for node in rewriter.program.calls():
            if (matmul := matmul_of(node)) is not None:
                groups.setdefault((matmul.x, matmul.bias is None), []).append(node)
        for linears in (part for group in groups.values() for part in _by_split(rewriter.program, group)):
            if len(linears) > 1:
                if reason := _why_not_merge(linears, rewriter.program.mesh):
                    rewriter.refuse(linears[0], reason, by_request=True)
                elif reason := _obstacle(rewriter, linears):
                    rewriter.refuse(linears[0], reason)
                elif rewriter.take(linears[0]):
                    _merge(rewriter, linears)


def _matmul(node: fx.Node) -> Matmul:
    matmul = matmul_of(node)
    assert matmul is not None
    return matmul


def _by_split(program: Program, linears: list[fx.Node]) -> list[list[fx.Node]]:
    """Return linears with the same input in parts to merge: those that a mesh splits, and those that stay whole.

    If no part would have two linears, all linears are one part, and merging them is refused with the reason.
    """
    parts: dict[bool, list[fx.Node]] = {}
    for node in linears:
        spec = program.params.get(str(_matmul(node).weight.parts["weight"].target))
        parts.setdefault(spec is not None and bool(spec.split or spec.placement), []).append(node)
    return [*parts.values()] if any(len(part) > 1 for part in parts.values()) else [linears]


def _merged_format(linears: list[fx.Node], mesh: Mesh) -> Format:
    """Return the format of the merged weight: that of the linears, where each row gets its own scale.

    A single scale of a weight is repeated for its rows, which changes no number. A mesh would have to divide the
    copies, so there the format stays as it is.
    """
    format = _matmul(linears[0]).weight.format
    if format.row_by_row or mesh:
        return format
    levels = tuple(replace(level, rows=level.rows or 1) for level in format.levels)
    return named(replace(format, levels=levels))


def _why_not_merge(linears: list[fx.Node], mesh: Mesh) -> str | None:
    """Return why the weights of these linears cannot be concatenated in their storage formats; None if they can.

    They can if they have one format, if each row has its own scales and zero points, if whole blocks of rows share a
    scale, and if equal tensors order the columns and round the input.
    """
    formats = {_matmul(node).weight.format.name: _matmul(node).weight.format for node in linears}
    if len(formats) > 1:
        return f"the weight formats differ: {', '.join(sorted(formats))}"
    format = _merged_format(linears, mesh)
    if not format.row_by_row:
        return f"format '{format.name}' has one scale for a whole weight"
    block = format.granule(0)
    for node in linears:
        rows = tensor_type(node).shape[-1]
        if isinstance(rows, int) and rows % block:
            return f"{rows} rows of a weight are no multiple of the {block} that share a scale"
    for part in sorted(SHARED_PARTS & set(format.parts)):
        params = [_matmul(node).weight.parts[part] for node in linears]
        if len(set(params)) > 1:
            return f"each weight has its own {part}: {', '.join(str(param.target) for param in params)}"
    return None


def _operands(linears: list[fx.Node]) -> dict[str, list[fx.Node]]:
    """Return the operands to concatenate, one of each linear, by operand name.

    Names are "weight", further parts of a quantized weight such as "scales", and "bias" if the linears have one. Parts
    that linears share are left out.
    """
    matmuls = [_matmul(node) for node in linears]
    own = [part for part in matmuls[0].weight.parts if part not in SHARED_PARTS]
    parts = {part: [one.weight.parts[part] for one in matmuls] for part in own}
    biases = [one.bias for one in matmuls if one.bias is not None]
    return {**parts, "bias": biases} if biases else parts


def _obstacle(rewriter: Rewriter, linears: list[fx.Node]) -> str | None:
    """Return why the params that these linears read cannot be concatenated; None if they can."""
    program = rewriter.program
    for part, params in _operands(linears).items():
        parts = _PLURALS[part]
        for param in params:
            if param.op != "placeholder" or param.meta["kind"] != "param":
                return f"%{param.name} is not a param but {described(param)}"
            if len(param.users) > 1 and not _repeats(linears, part):
                return f"param '{param.target}' has other uses: {len(param.users)} in all"
        if len({tensor_type(param).dtype for param in params}) > 1:
            dtypes = ", ".join(f"{param.target} {DTYPE_NAMES[tensor_type(param).dtype]}" for param in params)
            return f"the {parts} have several dtypes: {dtypes}"
        specs = _specs(rewriter, linears, part, params)
        if _merged_placement(specs, program.mesh) is None or _merged_split(specs) is None:
            placed = ", ".join(
                f"{param.target} {spec.split or ' '.join(map(str, spec.placement)) or 'whole'}"
                for param, spec in zip(params, specs, strict=True)
            )
            return f"the {parts} have no common placement along axis 0: {placed}"
    return None


def _repeats(linears: list[fx.Node], part: str) -> bool:
    """Return whether a part of these weights has one row for all rows, which merging repeats."""
    format = _matmul(linears[0]).weight.format
    return part in format.parts and part not in ("weight", *SHARED_PARTS) and not format.block(part)[0]


def _specs(rewriter: Rewriter, linears: list[fx.Node], part: str, params: list[fx.Node]) -> list[ParamSpec]:
    """Return the specs of params to concatenate. One row for all rows of a weight is repeated for each."""
    specs = [rewriter.program.params[str(param.target)] for param in params]
    if not _repeats(linears, part):
        return specs
    made = []
    for spec, node in zip(specs, linears, strict=True):
        rows = tensor_type(node).shape[-1]
        assert isinstance(rows, int)
        shape = (rows, *spec.type.shape[1:])
        made.append(replace(spec, type=TensorType(spec.type.dtype, shape), recipe=repeat(spec.recipe, 0, rows)))
    return made


def _merged_placement(specs: list[ParamSpec], mesh: Mesh) -> tuple[Placement, ...] | None:
    """Return how a mesh distributes the concatenation of these params along axis 0.

    If they are sharded, each param becomes a segment and is sharded by itself. The result is None if their placements
    differ or are not along axis 0.
    """
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
    """Return how a mesh may divide the concatenation of these params along axis 0, as a tuple of one item.

    The item is None if it must stay whole. The result is None if the splits of the params cannot be combined.
    """
    try:
        return (concatenated([spec.split for spec in specs], [int(spec.type.shape[0]) for spec in specs]),)
    except VerifyError:
        return None


def _merge(rewriter: Rewriter, linears: list[fx.Node]) -> None:
    first = linears[0]
    # Read x here, because an earlier merge may have replaced it by a slice.
    x, format = _matmul(first).x, _merged_format(linears, rewriter.program.mesh)
    merged = {
        part: _merged_param(rewriter, params, _specs(rewriter, linears, part, params))
        for part, params in _operands(linears).items()
    }
    bias = merged.pop("bias", None)
    merged |= {part: node for part, node in _matmul(first).weight.parts.items() if part in SHARED_PARTS}
    op, args, attributes = Matmul(x, StoredWeight(format, merged), bias).call()
    matmul = rewriter.call(op, *args, before=first, **attributes)
    users = [user for node in linears for user in node.users]
    parts: list[fx.Node] = []
    begin = 0
    for node in linears:
        width = tensor_type(node).shape[-1]
        assert isinstance(width, int)
        origin = node.meta.get("origin", "")
        parts.append(
            rewriter.call(torch.ops.aten.slice.Tensor, matmul, 1, begin, begin + width, before=first, origin=origin)
        )
        begin += width
    for node, part_of in zip(linears, parts, strict=True):
        rewriter.replace(node, part_of)
    rewriter.retype(users)


def _merged_param(rewriter: Rewriter, params: list[fx.Node], specs: list[ParamSpec]) -> fx.Node:
    """Add a param that concatenates params along axis 0, and return its node. `specs` are their specs.

    Its name combines the old names, as in "layers.0.q_k_v.weight".
    """
    program = rewriter.program
    names = [str(param.target).split(".") for param in params]
    # layers.0.q.weight, layers.0.k.weight -> layers.0.q_k.weight; a, b -> a_b
    name = ".".join([*names[0][:-2], "_".join(parts[-2:][0] for parts in names), *names[0][1:][-1:]])
    rows = sum(size for spec in specs for size in spec.type.shape[:1] if isinstance(size, int))
    placement = _merged_placement(specs, program.mesh)
    split = _merged_split(specs)
    assert placement is not None and split is not None
    merged_type = TensorType(specs[0].type.dtype, (rows, *specs[0].type.shape[1:]))
    made = _merged_recipe(specs, placement, program.mesh)
    return rewriter.add_param(name, ParamSpec(merged_type, made, placement, *split))


def _merged_recipe(specs: list[ParamSpec], placement: tuple[Placement, ...], mesh: Mesh) -> Recipe:
    """Return the recipe that makes the concatenation of these params from checkpoint tensors.

    On a mesh, its last steps take the part of one rank, as the verifier requires.
    """
    recipes, split = [spec.recipe for spec in specs], [place for place in placement if place.kind == "shard"]
    for _ in split if mesh else ():
        recipes = [recipe.inputs[0] for recipe in recipes]
    merged = concat(recipes)
    for place in split if mesh else ():
        merged = shard(merged, place.axis, place.dim, place.segments)
    return merged
