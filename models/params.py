"""Parameters of a definition: each is declared once, with the recipe that makes it and how a mesh splits it."""

from dataclasses import dataclass, replace

import torch
from torch import nn

from ingot.ir import recipe
from ingot.ir.errors import InternalError
from ingot.ir.recipe import Recipe
from ingot.ir.types import Split


@dataclass(frozen=True)
class Declaration:
    """The recipe of a parameter, and how a mesh splits it; None: every rank has it whole."""

    recipe: Recipe
    split: Split | None = None


def parameter(shape: tuple[int, ...], recipe: Recipe, dtype: torch.dtype, split: Split | None = None) -> nn.Parameter:
    """A parameter of a definition, which carries its declaration. A definition has no other parameters."""
    made = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
    made.declaration = Declaration(recipe, split)  # type: ignore[attr-defined]
    return made


def rounded(value: float, dtype: torch.dtype) -> float:
    """A constant as a weight of the dtype holds it."""
    return float(torch.tensor(value, dtype=dtype, device="cpu").item())


def declaration(made: nn.Parameter) -> Declaration | None:
    """What `parameter` was given; None for a parameter that was made without it."""
    return getattr(made, "declaration", None)


@dataclass(frozen=True)
class Place:
    """Where a block finds its tensors in the checkpoint, and the dtype of its weights.

    `place / "mlp"` is the place below, `place / ""` the same one. Tensors at a place with `rows` are those rows of what
    is stored there: from one to another, of each run of so many rows if there is a third number. Matrices at a
    `transposed` place, and below it, are stored [inputs, outputs].
    """

    prefix: str
    dtype: torch.dtype
    rows: tuple[int, int] | tuple[int, int, int] | None = None
    transposed: bool = False

    def __truediv__(self, name: str | int) -> "Place":
        if name == "":
            return self
        return Place(f"{self.prefix}.{name}".lstrip("."), self.dtype, transposed=self.transposed)

    def split(self, *sizes: int, groups: int = 1) -> list["Place"]:
        """Rows of what is stored here: linears of these sizes, merged into one. Their rows go by `groups`: each group
        has its part of the first, then its part of the second, and so on."""
        if torn := [size for size in sizes if size % groups]:
            raise InternalError(
                f"{torn[0]} rows of '{self.prefix}' cannot go by {groups} groups", expected="a multiple"
            )
        parts = [size // groups for size in sizes]
        ends = [sum(parts[: index + 1]) for index in range(len(parts))]
        runs = () if groups == 1 else (sum(parts),)
        return [replace(self, rows=(end - part, end, *runs)) for end, part in zip(ends, parts, strict=True)]

    def source(self, tensor: str) -> Recipe:
        """The recipe of a tensor that is stored here: source("weight") reads "PREFIX.weight"."""
        return self._rows(tensor, 0)

    def matrix(self, tensor: str) -> Recipe:
        """The recipe of a matrix [outputs, inputs] that is stored here."""
        return recipe.permute(self._rows(tensor, 1), (1, 0)) if self.transposed else self._rows(tensor, 0)

    def _rows(self, tensor: str, dim: int) -> Recipe:
        found = recipe.source(f"{self.prefix}.{tensor}")
        return found if self.rows is None else recipe.take_slice(found, dim, *self.rows)
