"""The linears of a program that have adapters, and their description in an artifact."""

from collections.abc import Mapping

from ingot.ir import ops
from ingot.ir.adapters.low_rank import tensors_of
from ingot.ir.artifact.adapters import AdaptedLinear, AdapterSites, Segment
from ingot.ir.program import Program, named_arguments
from ingot.ir.recipe import Recipe

# The names of the states with the factors of a linear: these, and then the name of the linear's weight.
STATE_A, STATE_B = "lora_a.", "lora_b."


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
        weight = str(expand["b"].target).removeprefix(STATE_B)
        recipes = weight_recipe(program.params[weight].recipe)
        segments = [
            Segment(rows=rows, tensor=tensor, shape=shapes[tensor], recipe=str(recipe))
            for rows, recipe in zip(expand["segments"], recipes, strict=True)
            for (tensor,) in (tensors_of(recipe),)
        ]
        found.append(AdaptedLinear(a=STATE_A + weight, b=STATE_B + weight, segments=tuple(segments)))
    return AdapterSites(linears=tuple(found))
