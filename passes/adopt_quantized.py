"""adopt-quantized: linears multiply by the weights of a quantized checkpoint as they are stored."""

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from ingot.ir import ops
from ingot.ir.artifact.record import Numerics
from ingot.ir.errors import OptionError, VerifyError
from ingot.ir.formats import Format, find_format
from ingot.ir.program import ParamSpec, Stage, named_arguments, tensor_type
from ingot.ir.recipe import Recipe, take_slice
from ingot.ir.types import Split
from ingot.ir.weights import StoredWeight, matmul_of, part_name
from ingot.passes.base import Pass, PassContext
from ingot.passes.rewrite import Rewriter


@dataclass(frozen=True)
class AdoptQuantized(Pass):
    """Replaces each `linear` with a weight that the checkpoint stores quantized by a `quant_linear` with its parts.

    The recipe of such a weight is `dequantize(parts)`, perhaps of some rows and cast. Without this pass, the weights
    are dequantized when the artifact is written, and activations are not rounded. Compiling a quantized checkpoint adds
    the pass.
    """

    name: ClassVar[str] = "adopt-quantized"
    numerics: ClassVar[Numerics] = Numerics.LOSSY
    joins: ClassVar[Stage] = Stage.QUANTIZED

    def run(self, rewriter: Rewriter, context: PassContext) -> None:
        known: dict[fx.Node, StoredWeight] = {}  # two linears may share a weight
        shared: dict[tuple[str, Recipe], fx.Node] = {}
        for node in list(rewriter.program.calls(ops.linear.overload)):
            weight = named_arguments(node)["weight"]
            if not isinstance(weight, fx.Node) or weight.meta.get("kind") != "param":
                continue
            spec = rewriter.program.params[str(weight.target)]
            if (found := stored_parts(spec.recipe)) is None:
                if _holds_dequantize(spec.recipe):
                    text = f"the weight is not stored so, but computed by '{spec.recipe.step}' from a stored weight"
                    rewriter.refuse(node, text)
                continue
            if not rewriter.take(node):
                break
            matmul = matmul_of(node)
            assert matmul is not None
            if weight not in known:
                known[weight] = _adopted(rewriter, weight, *found, shared)
            op, args, attributes = replace(matmul, weight=known[weight]).call()
            rewriter.replace(node, rewriter.call(op, *args, before=node, **attributes))


def _holds_dequantize(recipe: Recipe) -> bool:
    return recipe.step == "dequantize" or any(map(_holds_dequantize, recipe.inputs))


def stored_parts(recipe: Recipe) -> tuple[Format, dict[str, Recipe]] | None:
    """Return the format and the parts of a weight whose recipe dequantizes them; None for any other recipe.

    The recipe may cast the weight, and may take some of its rows, in whole blocks that share a scale.
    """
    if recipe.step == "cast":
        return stored_parts(recipe.inputs[0])
    if recipe.step == "dequantize":
        format = find_format(str(recipe.attr("format")))
        return format, dict(zip(format.parts, recipe.inputs, strict=True))
    attrs = dict(recipe.attrs)
    if recipe.step != "slice" or attrs["dim"] != 0 or "every" in attrs:
        return None
    if (found := stored_parts(recipe.inputs[0])) is None:
        return None
    (format, parts), begin, end = found, int(str(attrs["begin"])), int(str(attrs["end"]))
    if begin % format.granule(0) or end % format.granule(0):
        return None
    for part, made in parts.items():
        if rows := format.block(part)[0]:
            parts[part] = take_slice(made, 0, begin // rows, end // rows)
    return format, parts


def _adopted(
    rewriter: Rewriter,
    weight: fx.Node,
    format: Format,
    recipes: dict[str, Recipe],
    shared: dict[tuple[str, Recipe], fx.Node],
) -> StoredWeight:
    """Add the params that store a weight in `format`, and return them. A mesh divides them like the weight.

    Parts that several weights have in common, such as the scale of their input, become one param. `shared` has these.
    """
    name, (rows, inner) = str(weight.target), tensor_type(weight).bind({})
    if problem := format.obstacle((rows, inner)):
        raise OptionError(f"the format '{format.name}' cannot store the weight: {problem}", where=f"param {name}")
    spec = rewriter.program.params[name]
    nodes = {}
    for part, value_type in format.types((rows, inner), spec.type.dtype).items():
        key = part, recipes[part]
        if key in shared:
            nodes[part] = shared[key]
            continue
        made = ParamSpec(value_type, recipes[part], split=_split(format, spec.split, part, name))
        nodes[part] = rewriter.add_param(part_name(name, part), made)
        if not any(format.block(part)):
            shared[key] = nodes[part]
    return StoredWeight(format, nodes)


def _split(format: Format, split: Split | None, part: str, name: str) -> Split | None:
    try:
        return format.split(split, part)
    except VerifyError as error:
        raise OptionError(error.what, where=f"param {name}", expected=error.expected) from None
