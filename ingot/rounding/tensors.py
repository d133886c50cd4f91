"""The tensors that the check reads from a checkpoint: gains and biases whole, a few rows of matrices and embeddings."""

from collections.abc import Callable
from dataclasses import replace

import torch

from ingot.ir.errors import CheckpointError
from ingot.ir.formats import dequantize, find_format
from ingot.ir.recipe import Recipe

# Returns a checkpoint tensor by its name.
Read = Callable[[str], torch.Tensor]

# Rows of a matrix that represent all of them: 1 MB of a matrix with 4096 columns in bfloat16.
MOST_ROWS = 128
_SOURCE = Recipe("source", attrs=(("name", ""),))


def few_rows(recipe: Recipe, shape: tuple[int, ...], read: Read) -> torch.Tensor:
    """Return the tensor that a recipe (steps over checkpoint tensors) makes. Of a matrix, return only some rows.

    They are at most MOST_ROWS evenly spaced rows. `shape` is the shape of the whole tensor.
    """
    count = shape[0]
    if len(shape) < 2 or count <= MOST_ROWS:
        return recipe.execute(read)
    return rows_of(recipe, torch.arange(MOST_ROWS) * count // MOST_ROWS, read)


def rows_of(recipe: Recipe, rows: torch.Tensor, read: Read) -> torch.Tensor:
    """Return the rows with the indices `rows` of the tensor that a recipe (steps over checkpoint tensors) makes.

    If the checkpoint stores the tensor, only these rows are read from the file.
    """
    attrs = dict(recipe.attrs)
    if recipe.step == "cast":
        few = rows_of(recipe.inputs[0], rows, read)
        return Recipe("cast", (_SOURCE,), recipe.attrs).execute(lambda _: few)
    if recipe.step == "slice" and attrs["dim"] == 0 and attrs.get("every") is None:
        return rows_of(recipe.inputs[0], rows + int(str(attrs["begin"])), read)
    if recipe.step == "dequantize":
        return _dequantized_rows(recipe, rows, read)
    return recipe.execute(read)[rows]


def _dequantized_rows(recipe: Recipe, rows: torch.Tensor, read: Read) -> torch.Tensor:
    """Return some rows of a weight that is stored quantized. Only these are dequantized."""
    format = find_format(str(recipe.attr("format")))
    tensors = {part: one.execute(read) for part, one in zip(format.parts, recipe.inputs, strict=True)}
    if format.layout.tile[0] > 1 or format.rotated_out:
        return dequantize(tensors, format)[rows]
    few = {
        part: tensor[rows // size] if (size := format.block(part)[0]) else tensor for part, tensor in tensors.items()
    }
    levels = tuple(replace(level, rows=min(level.rows, 1)) for level in format.levels)
    return dequantize(few, replace(format, levels=levels))


def is_quantized(recipe: Recipe) -> bool:
    """Return whether the checkpoint stores a param in a quantized format. `recipe` says how the param is made."""
    return recipe.step == "dequantize" or any(is_quantized(one) for one in recipe.inputs)


def check_finite(name: str, tensor: torch.Tensor, recipe: Recipe, folder: str) -> None:
    """Raise CheckpointError if a param has elements that are not finite.

    `folder` is the checkpoint's folder, for the message.
    """
    if lost := int((~tensor.isfinite()).sum()):
        raise CheckpointError(
            f"{lost} of {tensor.numel()} elements of the tensor {_stored(recipe)} are not finite",
            where=f"{folder}, param '{name}'",
            expected="finite numbers",
            hint="download or convert the checkpoint again",
        )


def check_gain(name: str, gain: torch.Tensor, recipe: Recipe, folder: str) -> None:
    """Raise CheckpointError if all gains of a norm are zero.

    `folder` is the checkpoint's folder, for the message.
    """
    if not bool(gain.any()):
        raise CheckpointError(
            f"all {gain.numel()} elements of the tensor {_stored(recipe)}, the gain of a norm, are zero",
            where=f"{folder}, param '{name}'",
            expected="a gain for each element",
            hint="download or convert the checkpoint again: such a layer computes nothing",
        )


def _stored(recipe: Recipe) -> str:
    return ", ".join(f"'{name}'" for name in sorted(recipe.sources()))
