"""Weights of several experts in one format: a stack of matrices [E, N, K].

Each tensor that stores the stack has the experts on its first axis, and then the shape of the format's part. So an
expert's matrix is stored as any other, also where one scale is for all of its rows.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch

from ingot.ir.errors import VerifyError
from ingot.ir.formats.format import Format, dequantize, quantize
from ingot.ir.types import Split, TensorType


def is_stack(part: str, dims: int, format: Format) -> bool:
    """Return whether a tensor with `dims` axes stores the part `part` of a stack, and not of one matrix."""
    return dims > len(format.types(format.layout.tile, torch.float32)[part].shape)


def quantize_stack(matrices: Iterable[torch.Tensor], format: Format) -> dict[str, torch.Tensor]:
    """Store each matrix of a stack [E, N, K] in `format`, and return the tensors by part name.

    `matrices` is the stack, or yields its matrices. Raises ValueError as `quantize` does.
    """
    made = [quantize(matrix, format) for matrix in matrices]
    return {part: torch.stack([one[part] for one in made]) for part in format.parts}


def dequantize_stack(
    parts: Mapping[str, torch.Tensor], format: Format, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return the stack [E, N, K] that `parts` store in `format`. It is computed in `dtype`."""
    return torch.stack([dequantize(matrix_of(parts, one), format, dtype) for one in range(len(parts["weight"]))])


def matrix_of(parts: Mapping[str, torch.Tensor], index: int) -> dict[str, torch.Tensor]:
    """Return the tensors that store one matrix of a stack, by part name."""
    return {name: part[index] for name, part in parts.items()}


def stack_shape(packed: tuple[int, ...], format: Format) -> tuple[int, int, int]:
    """Return the shape [E, N, K] of a stack, from the shape `packed` of its packed elements."""
    return packed[0], *format.shape_of(packed[1:])


def stack_types(shape: tuple[int, int, int], format: Format, dtype: torch.dtype) -> dict[str, TensorType]:
    """Return the types of the tensors that store a stack of this shape, by part name. `dtype` is that of its floats."""
    types = format.types(shape[1:], dtype)
    return {part: TensorType(one.dtype, (shape[0], *one.shape)) for part, one in types.items()}


def split_stack(split: Split | None, part: str, format: Format) -> Split | None:
    """Return how a mesh may split one tensor of a stack; None if every rank holds all of it.

    `split` says how it may split the stack of floats: along rows or columns. Raises VerifyError as `Format.split` does,
    and if the experts themselves are split.
    """
    if split is None:
        return None
    if split.dim == 0:
        raise VerifyError("a split among experts", expected="a split of each expert's rows or columns")
    own = format.split(replace(split, dim=split.dim - 1), part)
    return None if own is None else replace(own, dim=own.dim + 1)
