"""adopt-quantized: linears and experts multiply by the weights of a quantized checkpoint as they are stored."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from ingot.ir import ops
from ingot.ir.artifact.record import Numerics
from ingot.ir.errors import OptionError, VerifyError
from ingot.ir.formats import Format
from ingot.ir.program import ParamSpec, Stage, is_call, named_arguments, tensor_type
from ingot.ir.recipe import Recipe
from ingot.ir.types import Split
from ingot.ir.weights import StoredExperts, StoredWeight, experts_of, matmul_of, part_name
from ingot.passes.base import Pass, PassContext
from ingot.passes.rewrite import Rewriter
from ingot.passes.store_experts import splits_of_experts, store_stack
from ingot.passes.stored_parts import Parts, holds_dequantize, stacked_parts, stored_parts


@dataclass(frozen=True)
class AdoptQuantized(Pass):
    """Replaces each `linear` with a weight that the checkpoint stores quantized by a `quant_linear` with its parts.

    The recipe of such a weight is `dequantize(parts)`, perhaps of some rows and cast. A call of `experts` gets the
    parts of its weights, whose recipes stack those of each expert, and join gate and up. Without this pass, the weights
    are dequantized when the artifact is written, and activations are not rounded. Compiling a quantized checkpoint adds
    the pass.
    """

    name: ClassVar[str] = "adopt-quantized"
    numerics: ClassVar[Numerics] = Numerics.LOSSY
    joins: ClassVar[Stage] = Stage.QUANTIZED

    def run(self, rewriter: Rewriter, context: PassContext) -> None:
        known: dict[fx.Node, StoredWeight] = {}  # two linears may share a weight
        shared: dict[tuple[str, Recipe], fx.Node] = {}
        for node in list(rewriter.program.calls()):
            if is_call(node, ops.linear.overload):
                found = _found(rewriter, node, named_arguments(node)["weight"])
                if found is None:
                    continue
                if not rewriter.take(node):
                    break
                matmul = matmul_of(node)
                assert matmul is not None
                weight = matmul.weight.parts["weight"]
                if weight not in known:
                    known[weight] = _adopted(rewriter, weight, found, shared)
                op, args, attributes = replace(matmul, weight=known[weight]).call()
            elif (experts := experts_of(node)) is not None:
                stored = {name: _found(rewriter, node, one.parts["weight"]) for name, one in experts.weights.items()}
                if not any(stored.values()):
                    continue
                if not rewriter.take(node):
                    break
                made = {name: one for name, one in stored.items() if one is not None}
                op, args, attributes = _adopted_experts(rewriter, experts, made, mesh=bool(context.mesh)).call()
            else:
                continue
            rewriter.replace(node, rewriter.call(op, *args, before=node, **attributes))


def _found(rewriter: Rewriter, node: fx.Node, weight: object) -> Parts | None:
    """Return the stored parts of a weight of `node`; None if the checkpoint stores floats.

    If it is computed from a stored weight, the refusal says by what.
    """
    if not isinstance(weight, fx.Node) or weight.meta.get("kind") != "param":
        return None
    spec = rewriter.program.params[str(weight.target)]
    if not holds_dequantize(spec.recipe):
        return None
    shape = spec.type.bind({})
    found = stored_parts(spec.recipe) if len(shape) == 2 else stacked_parts(spec.recipe, (shape[0], shape[1], shape[2]))
    if isinstance(found, str):
        rewriter.refuse(node, found)
        return None
    if len(shape) == 3 and (problem := found.format.obstacle((shape[1], shape[2]))):
        rewriter.refuse(node, f"the format '{found.format.name}' cannot store the experts: {problem}")
        return None
    return found


def _adopted_experts(
    rewriter: Rewriter, experts: StoredExperts, stored: Mapping[str, Parts], *, mesh: bool
) -> StoredExperts:
    """Add the params that store the weights `stored` of experts, and return the experts with them."""
    formats = {name: one.format for name, one in stored.items()}
    splits = splits_of_experts(rewriter.program, experts, formats, mesh=mesh)
    made = {
        name: store_stack(rewriter, str(experts.weights[name].parts["weight"].target), one.format, one.recipes, splits)
        for name, one in stored.items()
    }
    return replace(experts, weights={**experts.weights, **made})


def _adopted(
    rewriter: Rewriter,
    weight: fx.Node,
    stored: Parts,
    shared: dict[tuple[str, Recipe], fx.Node],
) -> StoredWeight:
    """Add the params that store a weight in `format`, and return them. A mesh divides them like the weight.

    Parts that several weights have in common, such as the scale of their input, become one param. `shared` has these.
    """
    format, recipes = stored.format, stored.recipes
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
