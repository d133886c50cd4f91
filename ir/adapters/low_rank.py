"""Apply the recipe of a linear's weight to the factors of a change of low rank.

A recipe makes the weight of a checkpoint tensor by slices, concatenations and the like. These keep the rank of
`left @ right`, and work on one of the two factors. So an adapter of a checkpoint tensor becomes an adapter of the
weight without computing the matrix.
"""

from dataclasses import dataclass

import torch

from ingot.ir.errors import VerifyError
from ingot.ir.layout import TRANSPOSED
from ingot.ir.recipe import STEPS, Recipe

_KEEP_RANK = frozenset({"source", "cast", "affine", "slice", "permute", "concat", "quantize", "add"})


@dataclass(frozen=True, eq=False)
class LowRank:
    """The matrix `left @ right`, with left [rows, rank] and right [rank, columns]."""

    left: torch.Tensor
    right: torch.Tensor


def tensors_of(recipe: Recipe) -> frozenset[str]:
    """Return the names of the checkpoint tensors that a weight is made of. Adapters merged into it do not count."""
    if recipe.step == "source":
        return recipe.sources()
    inputs = recipe.inputs[:1] if recipe.step == "add" else recipe.inputs
    return frozenset().union(*map(tensors_of, inputs))


def why_not(recipe: Recipe) -> str:
    """Return why `change_of` cannot follow a recipe of one checkpoint tensor; "" if it can."""
    if recipe.step not in _KEEP_RANK:
        return f"the recipe step '{recipe.step}' does not keep a low rank"
    if recipe.step == "permute" and recipe.attr("dims") != TRANSPOSED:
        return "the recipe permutes more than two dims"
    if recipe.step == "concat" and recipe.attr("dim") != 0:
        return "the recipe concatenates columns"
    inputs = recipe.inputs[:1] if recipe.step == "add" else recipe.inputs
    return next((reason for one in inputs if (reason := why_not(one))), "")


def change_of(recipe: Recipe, change: LowRank) -> LowRank:
    """Return the change of a weight, given the change of the one checkpoint tensor that its recipe reads.

    Raises VerifyError for a recipe that `why_not` refuses.
    """
    if reason := why_not(recipe):
        raise VerifyError(reason, where=str(recipe)[:200])
    if recipe.step == "source":
        return change
    first = change_of(recipe.inputs[0], change)
    if recipe.step == "permute":
        return LowRank(first.right.T, first.left.T)
    if recipe.step == "slice":
        run, attrs = STEPS["slice"], dict(recipe.attrs)
        rows = attrs["dim"] in (0, -2)
        made = run([first.left if rows else first.right], {**attrs, "dim": 0 if rows else 1})
        assert isinstance(made, torch.Tensor)
        return LowRank(made, first.right) if rows else LowRank(first.left, made)
    if recipe.step == "affine":
        scale = recipe.attr("scale")
        assert isinstance(scale, int | float)
        return LowRank(first.left * scale, first.right)  # the offset is part of the weight, not of its change
    if recipe.step == "concat":
        parts = [first, *(change_of(one, change) for one in recipe.inputs[1:])]
        if any(not torch.equal(one.right, first.right) for one in parts):
            raise VerifyError("the parts have different columns", where=str(recipe)[:200])
        return LowRank(torch.cat([one.left for one in parts]), first.right)
    return first  # a cast, a quantization, or the sum with a merged adapter
