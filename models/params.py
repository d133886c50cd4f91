"""Parameters of a model definition: each is declared once, with its checkpoint tensors and its split over a mesh."""

from dataclasses import dataclass, replace

import torch
from torch import nn

from ingot.ir import recipe
from ingot.ir.errors import InternalError
from ingot.ir.recipe import Recipe
from ingot.ir.types import Split


@dataclass(frozen=True)
class Declaration:
    """How a parameter of a model definition is made.

    recipe   how its value is made from checkpoint tensors
    split    how a mesh divides it; None: each rank has all of it
    """

    recipe: Recipe
    split: Split | None = None


def parameter(shape: tuple[int, ...], recipe: Recipe, dtype: torch.dtype, split: Split | None = None) -> nn.Parameter:
    """Return a new parameter without values, with its recipe and split in the attribute `declaration`.

    `recipe` describes how its value is made from checkpoint tensors. `split` says how a mesh divides it; None: each
    rank has all of it. Model definitions make all their parameters with this function.
    """
    made = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
    made.declaration = Declaration(recipe, split)  # type: ignore[attr-defined]
    return made


def rounded(value: float, dtype: torch.dtype) -> float:
    """Return the number `value`, rounded to the dtype."""
    return float(torch.tensor(value, dtype=dtype, device="cpu").item())


def declaration(made: nn.Parameter) -> Declaration | None:
    """Return how a parameter is made and split over a mesh; None if it was not made by the function `parameter`."""
    return getattr(made, "declaration", None)


@dataclass(frozen=True)
class Place:
    """A location in the checkpoint: the prefix of the tensor names of a block.

    `place / "mlp"` adds ".mlp" to the prefix. `place / ""` equals `place`.

    dtype        dtype of the block's weights in the model
    rows         (begin, end): the location is only these rows of a stored tensor. (begin, end, run): it is these rows
                 of each run of `run` rows. None: all rows.
    transposed   whether the checkpoint stores matrices as [inputs, outputs]
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
        """Return the locations of several linears that the checkpoint stores in this place as one tensor.

        `sizes` are the numbers of rows of the linears. The stored rows are in `groups` equal groups. Each group holds
        rows of the first linear, then of the second, and so on. Raises InternalError if `groups` does not divide a
        size.
        """
        if torn := [size for size in sizes if size % groups]:
            raise InternalError(
                f"{torn[0]} rows of '{self.prefix}' cannot be split into {groups} groups", expected="a multiple"
            )
        parts = [size // groups for size in sizes]
        ends = [sum(parts[: index + 1]) for index in range(len(parts))]
        runs = () if groups == 1 else (sum(parts),)
        return [replace(self, rows=(end - part, end, *runs)) for end, part in zip(ends, parts, strict=True)]

    def source(self, tensor: str) -> Recipe:
        """Return the recipe for a tensor: how to read it from the checkpoint.

        source("weight") reads the tensor "PREFIX.weight".
        """
        return self._rows(tensor, 0)

    def matrix(self, tensor: str) -> Recipe:
        """Return the recipe for a matrix: how to read it from the checkpoint, as [outputs, inputs].

        matrix("weight") reads the tensor "PREFIX.weight".
        """
        return recipe.permute(self._rows(tensor, 1), (1, 0)) if self.transposed else self._rows(tensor, 0)

    def _rows(self, tensor: str, dim: int) -> Recipe:
        found = recipe.source(f"{self.prefix}.{tensor}")
        return found if self.rows is None else recipe.take_slice(found, dim, *self.rows)
