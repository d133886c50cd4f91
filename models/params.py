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
    """How a parameter is made: the recipe that makes it from checkpoint tensors, and how a mesh splits it.

    If `split` is None, every rank has the whole parameter.
    """

    recipe: Recipe
    split: Split | None = None


def parameter(shape: tuple[int, ...], recipe: Recipe, dtype: torch.dtype, split: Split | None = None) -> nn.Parameter:
    """Return a new parameter, which stores its recipe and split as attribute `declaration`.

    `recipe` makes it from checkpoint tensors. `split` says how a mesh divides it; None: every rank has all of it. This
    function makes all parameters of model definitions.
    """
    made = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
    made.declaration = Declaration(recipe, split)  # type: ignore[attr-defined]
    return made


def rounded(value: float, dtype: torch.dtype) -> float:
    """Return the number `value`, rounded to the dtype."""
    return float(torch.tensor(value, dtype=dtype, device="cpu").item())


def declaration(made: nn.Parameter) -> Declaration | None:
    """Return the recipe and split of a parameter; None if it was not made by the function `parameter`."""
    return getattr(made, "declaration", None)


@dataclass(frozen=True)
class Place:
    """The location of a block's tensors in the checkpoint: the prefix of their names. `dtype` is that of its weights.

    `place / "mlp"` adds "mlp" to the prefix; `place / ""` is the same place.

    rows         (begin, end): use only these rows of the stored tensors; (begin, end, run): use these rows of each run
                 of `run` rows; None: use all
    transposed   matrices with this prefix are stored [inputs, outputs]
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
        """Return the location (Place) of each of several linears that the checkpoint stores here as one tensor.

        `sizes` are their numbers of rows. The stored rows are in `groups` groups: each group has its part of the first
        linear, then of the second, and so on. Raises InternalError if a size is no multiple of `groups`.
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
        """Return the recipe that reads a checkpoint tensor: source("weight") reads "PREFIX.weight"."""
        return self._rows(tensor, 0)

    def matrix(self, tensor: str) -> Recipe:
        """Return the recipe that reads a matrix, such as "weight", as [outputs, inputs]."""
        return recipe.permute(self._rows(tensor, 1), (1, 0)) if self.transposed else self._rows(tensor, 0)

    def _rows(self, tensor: str, dim: int) -> Recipe:
        found = recipe.source(f"{self.prefix}.{tensor}")
        return found if self.rows is None else recipe.take_slice(found, dim, *self.rows)
