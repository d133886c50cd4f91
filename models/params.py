"""Parameters of a definition: each is declared once, with its recipe and its split over a mesh."""

from dataclasses import dataclass, replace

import torch
from torch import nn

from ingot.ir import recipe
from ingot.ir.errors import InternalError
from ingot.ir.recipe import Recipe
from ingot.ir.types import Split


@dataclass(frozen=True)
class Declaration:
    """The recipe of a parameter, and its split over a mesh; None: every rank has the whole parameter."""

    recipe: Recipe
    split: Split | None = None


def parameter(shape: tuple[int, ...], recipe: Recipe, dtype: torch.dtype, split: Split | None = None) -> nn.Parameter:
    """Return a parameter with its declaration. All parameters of a definition are made by this function."""
    made = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
    made.declaration = Declaration(recipe, split)  # type: ignore[attr-defined]
    return made


def rounded(value: float, dtype: torch.dtype) -> float:
    """Return a constant rounded to the dtype."""
    return float(torch.tensor(value, dtype=dtype, device="cpu").item())


def declaration(made: nn.Parameter) -> Declaration | None:
    """Return the declaration of a parameter; None if it was not made by `parameter`."""
    return getattr(made, "declaration", None)


@dataclass(frozen=True)
class Place:
    """The name prefix of a block's tensors in the checkpoint, and the dtype of its weights.

    `place / "mlp"` is the place one level below; `place / ""` is the same place.

    rows         (begin, end): use only these rows of the stored tensors; (begin, end, run): use these rows of each run
                 of `run` rows
    transposed   matrices at this place and below are stored [inputs, outputs]
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
        """Return the places of linears of these sizes, which are stored here merged into one. Their rows are in
        `groups` groups: each group has its part of the first linear, then of the second, and so on."""
        if torn := [size for size in sizes if size % groups]:
            raise InternalError(
                f"{torn[0]} rows of '{self.prefix}' cannot be split into {groups} groups", expected="a multiple"
            )
        parts = [size // groups for size in sizes]
        ends = [sum(parts[: index + 1]) for index in range(len(parts))]
        runs = () if groups == 1 else (sum(parts),)
        return [replace(self, rows=(end - part, end, *runs)) for end, part in zip(ends, parts, strict=True)]

    def source(self, tensor: str) -> Recipe:
        """Return the recipe of a tensor stored here: source("weight") reads "PREFIX.weight"."""
        return self._rows(tensor, 0)

    def matrix(self, tensor: str) -> Recipe:
        """Return the recipe of a matrix [outputs, inputs] that is stored here."""
        return recipe.permute(self._rows(tensor, 1), (1, 0)) if self.transposed else self._rows(tensor, 0)

    def _rows(self, tensor: str, dim: int) -> Recipe:
        found = recipe.source(f"{self.prefix}.{tensor}")
        return found if self.rows is None else recipe.take_slice(found, dim, *self.rows)
