"""The linears of a program that have adapters, and their description in an artifact."""

from collections.abc import Mapping

from ingot.ir import ops
from ingot.ir.adapters.low_rank import tensors_of
from ingot.ir.artifact.adapters import AdaptedLinear, AdapterSites, Segment
from ingot.ir.errors import VerifyError
from ingot.ir.program import Program, named_arguments
from ingot.ir.recipe import Recipe
from ingot.ir.weights import matmul_of


def weight_recipe(recipe: Recipe) -> tuple[Recipe, ...]:
    """Return the recipes of the parts of a linear's weight, one for each part of its result.

    A weight that merge-linears has concatenated has a part for each linear. Any other weight is one part.
    """
    if recipe.step == "quantize":
        return weight_recipe(recipe.inputs[0])
    if recipe.step != "concat" or len(tensors_of(recipe)) == 1:
        return (recipe,)
    return recipe.inputs


def adapter_sites(program: Program, shapes: Mapping[str, tuple[int, ...]]) -> AdapterSites:
    """Return the linears of a program that have adapters, for the artifact.

    `program` is one after insert-adapters. `shapes` has the shapes of all checkpoint tensors, by name.
    """
    found = []
    for node in program.calls(ops.lora_expand.overload):
        expand = named_arguments(node)
        shrink, matmul = named_arguments(expand["shrunk"]), matmul_of(expand["y"])
        if matmul is None:
            raise VerifyError(f"%{node.name} changes no result of a linear", where=f"program {program.name}")
        recipes = weight_recipe(program.params[str(matmul.weight.parts["weight"].target)].recipe)
        segments = [
            Segment(rows=rows, tensor=tensor, shape=shapes[tensor], recipe=str(recipe))
            for rows, recipe in zip(expand["segments"], recipes, strict=True)
            for (tensor,) in (tensors_of(recipe),)
        ]
        found.append(AdaptedLinear(a=str(shrink["a"].target), b=str(expand["b"].target), segments=tuple(segments)))
    return AdapterSites(linears=tuple(found))
