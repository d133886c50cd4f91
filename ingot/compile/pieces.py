"""Weights in pieces: tensors that follow one another, so that a large weight is written without being copied first.

The weights of experts are stacks of matrices of a checkpoint. A stack that is made in memory costs the time of its new
pages, which is several times that of reading and writing its bytes.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from ingot.ir.formats import find_format
from ingot.ir.formats.stacked import quantize_stack
from ingot.ir.recipe import Recipe, Results, sliced

# Smaller tensors are made as everywhere: their copies cost little, and the steps of recipes are their one meaning.
_LEAST_BYTES = 1 << 18
# Rows of joined matrices are pieces only if they are as large on average. torch joins smaller ones faster.
_LEAST_PIECE = 1 << 16


@dataclass(frozen=True)
class Pieces:
    """A tensor of `shape` and `dtype`, in pieces.

    `tensors` have the dtype. Their elements, each tensor's in row-major order, are those of the tensor in row-major
    order. They may be strided views.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    tensors: tuple[torch.Tensor, ...]

    @staticmethod
    def of(tensor: torch.Tensor) -> "Pieces":
        return Pieces(tensor.dtype, tuple(tensor.shape), (tensor,))

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def meta(self) -> torch.Tensor:
        """Return a tensor of this shape and dtype without elements in memory."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def matrices(self) -> Iterator[torch.Tensor] | None:
        """Return an iterator over the tensor's parts along the first axis; None if a piece has elements of several."""
        size, filled = max(math.prod(self.shape[1:]), 1), 0
        groups: list[list[torch.Tensor]] = []
        for piece in self.tensors:
            if filled % size == 0:
                groups.append([])
            groups[-1].append(piece)
            filled += piece.numel()
            if filled > len(groups) * size:
                return None
        return (torch.cat([one.flatten() for one in group]).reshape(self.shape[1:]) for group in groups)

    def rows(self) -> tuple[torch.Tensor, ...] | None:
        """Return a tensor for each index of the first axis; None if the pieces are others."""
        if len(self.tensors) == 1 and self.tensors[0].shape == self.shape:
            return self.tensors[0].unbind()
        size = math.prod(self.shape[1:])
        whole = len(self.tensors) == self.shape[0] and all(piece.numel() == size for piece in self.tensors)
        return self.tensors if whole else None


def pieces_of(recipe: Recipe, read: Callable[[str], torch.Tensor], memo: dict[Recipe, Results]) -> Pieces:
    """Make the tensor of a recipe, as `Recipe.execute` does, and return it in pieces.

    Large tensors are not copied to join them along the first axis, or along the second one if their rows are large, nor
    to take a row of each run of rows. Raises CheckpointError as `execute` does.
    """
    attrs = dict(recipe.attrs)
    if recipe.step == "slice" and "every" in attrs:
        view = recipe.apply(lambda args, attrs: sliced(args[0], attrs), [recipe.inputs[0].execute(read, memo)])
        assert isinstance(view, torch.Tensor)
        if view.nbytes >= _LEAST_BYTES:
            return Pieces.of(view)
    if recipe.step == "quantize" and len(recipe.inputs) == 1:
        _quantize(recipe, read, memo)
    if recipe.step in ("stack", "concat") and attrs.get("dim") in (0, 1) and recipe.inputs:
        parts = [pieces_of(one, read, memo) for one in recipe.inputs]
        if (joined := _joined(recipe.step, attrs["dim"] == 1, parts)) is not None:
            return joined
    return Pieces.of(recipe.execute(read, memo))


def _quantize(recipe: Recipe, read: Callable[[str], torch.Tensor], memo: dict[Recipe, Results]) -> None:
    """Quantize the matrices of a stack in pieces one by one, so that there is no stack of floats. `memo` has them then.

    Does nothing if `memo` has them already, or if there are no such pieces.
    """
    step = replace(recipe, output="")
    if step in memo:
        return
    pieces = pieces_of(recipe.inputs[0], read, memo)
    if len(pieces.shape) == 3 and len(pieces.tensors) > 1 and (matrices := pieces.matrices()) is not None:
        format = find_format(str(recipe.attr("format")))
        memo[step] = recipe.apply(lambda args, attrs: quantize_stack(matrices, format), [pieces.meta()])


def _joined(step: str, second: bool, parts: Sequence[Pieces]) -> Pieces | None:
    """Return parts that are joined along the first axis or the second one, or None if torch must join them."""
    first = parts[0]
    dims = len(first.shape)
    if sum(one.nbytes for one in parts) < _LEAST_BYTES or any(
        len(one.shape) != dims or one.dtype != first.dtype for one in parts
    ):
        return None
    if step == "stack":
        if second or any(one.shape != first.shape for one in parts):
            return None
        return Pieces(first.dtype, (len(parts), *first.shape), _in_order(parts))
    if not second:
        if not dims or any(one.shape[1:] != first.shape[1:] for one in parts):
            return None
        return Pieces(first.dtype, (sum(one.shape[0] for one in parts), *first.shape[1:]), _in_order(parts))
    if dims < 2 or any((one.shape[0], *one.shape[2:]) != (first.shape[0], *first.shape[2:]) for one in parts):
        return None
    shape = first.shape[0], sum(one.shape[1] for one in parts), *first.shape[2:]
    if sum(one.nbytes for one in parts) < _LEAST_PIECE * len(parts) * shape[0]:
        return None
    rows: list[tuple[torch.Tensor, ...]] = []
    for one in parts:
        if (own := one.rows()) is None:
            return None
        rows.append(own)
    return Pieces(first.dtype, shape, tuple(piece for row in zip(*rows, strict=True) for piece in row))


def _in_order(parts: Sequence[Pieces]) -> tuple[torch.Tensor, ...]:
    return tuple(piece for one in parts for piece in one.tensors)
