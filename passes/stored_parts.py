"""Find the stored parts of a quantized weight in its recipe, where the recipe only selects and joins them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ingot.ir.formats import SHARED_PARTS, Format, find_format, named
from ingot.ir.recipe import Recipe, concat, repeat, reshape, stack, take_slice


@dataclass(frozen=True)
class Parts:
    """How a checkpoint stores a weight: its format, and the recipes of the format's parts by name."""

    format: Format
    recipes: dict[str, Recipe]


def holds_dequantize(recipe: Recipe) -> bool:
    """Return whether a recipe dequantizes a stored weight."""
    return recipe.step == "dequantize" or any(map(holds_dequantize, recipe.inputs))


def stored_parts(recipe: Recipe) -> Parts | str:
    """Return the parts of a matrix whose recipe dequantizes them, or why there are none.

    The recipe may cast the matrix, and may take some of its rows, in whole blocks that share a scale.
    """
    if recipe.step == "cast":
        return stored_parts(recipe.inputs[0])
    if recipe.step == "dequantize":
        format = find_format(str(recipe.attr("format")))
        return Parts(format, dict(zip(format.parts, recipe.inputs, strict=True)))
    attrs = dict(recipe.attrs)
    if recipe.step != "slice" or attrs["dim"] != 0 or "every" in attrs:
        return _computed(recipe)
    if isinstance(found := stored_parts(recipe.inputs[0]), str):
        return found
    format, begin, end = found.format, int(str(attrs["begin"])), int(str(attrs["end"]))
    if begin % format.granule(0) or end % format.granule(0):
        return f"rows {begin} to {end} cut through a block that shares a scale in format '{format.name}'"
    parts = dict(found.recipes)
    for part, made in parts.items():
        if rows := format.block(part)[0]:
            parts[part] = take_slice(made, 0, begin // rows, end // rows)
    return Parts(format, parts)


def stacked_parts(recipe: Recipe, shape: tuple[int, int, int]) -> Parts | str:
    """Return the parts of a stack [E, N, K] of matrices that the checkpoint stores quantized, or why there are none.

    The recipe may stack the matrices of experts, join those of gate and up along their rows, and take every second row
    of each. One scale for all rows of a joined matrix is repeated for each of its rows, which changes no number.
    """
    attrs = dict(recipe.attrs)
    if recipe.step == "cast":
        return stacked_parts(recipe.inputs[0], shape)
    if recipe.step == "stack" and attrs["dim"] == 0:
        found = _of_one_format([stored_parts(one) for one in recipe.inputs])
        if isinstance(found, str):
            return found
        format = found[0].format
        return Parts(format, {part: stack([one.recipes[part] for one in found]) for part in format.parts})
    if recipe.step == "concat" and attrs["dim"] == 1:
        experts, rows, columns = shape
        if rows % len(recipe.inputs):
            return f"{rows} rows are no {len(recipe.inputs)} matrices of equal size"
        own = experts, rows // len(recipe.inputs), columns
        found = _of_one_format([stacked_parts(one, own) for one in recipe.inputs])
        return found if isinstance(found, str) else _joined(found, own)
    if recipe.step == "slice" and attrs["dim"] == 1 and "every" in attrs:
        begin, end, every = (int(str(attrs[name])) for name in ("begin", "end", "every"))
        found_whole = stacked_parts(recipe.inputs[0], (shape[0], shape[1] // (end - begin) * every, shape[2]))
        return found_whole if isinstance(found_whole, str) else _every(found_whole, begin, end, every)
    return _computed(recipe)


def _computed(recipe: Recipe) -> str:
    return f"the weight is not stored so, but computed by '{recipe.step}' from a stored weight"


def _of_one_format(found: Sequence[Parts | str]) -> list[Parts] | str:
    """Return the parts of several weights, or why they are not stored in one format."""
    parts: list[Parts] = []
    for one in found:
        if isinstance(one, str):
            return one
        parts.append(one)
    names = sorted({one.format.name for one in parts})
    return parts if len(names) == 1 else f"the weight formats differ: {', '.join(names)}"


def _joined(stacks: Sequence[Parts], shape: tuple[int, int, int]) -> Parts | str:
    """Return the parts of stacks [E, N, K] that are joined along their rows. `shape` is that of each."""
    format, recipes = stacks[0].format, [one.recipes for one in stacks]
    for part in sorted(SHARED_PARTS & set(format.parts)):
        if any(one[part] != recipes[0][part] for one in recipes):
            return f"the joined weights have their own {part}"
    if shape[1] % format.granule(0):
        return f"{shape[1]} rows of a weight are no multiple of the {format.granule(0)} that share a scale"
    made = {}
    for part in format.parts:
        own = [one[part] for one in recipes]
        if part not in SHARED_PARTS and part != "weight" and not format.block(part)[0]:
            own = [repeat(one, 1, shape[1]) for one in own]
        made[part] = recipes[0][part] if part in SHARED_PARTS else concat(own, 1)
    if format.row_by_row:
        return Parts(format, made)
    # Repeated scales are right only for weights of equal size, which the reshape checks.
    packed = (shape[0], shape[1] // format.layout.tile[0], shape[2] // format.layout.tile[1], *format.layout.inner)
    made["weight"] = concat([reshape(one["weight"], packed) for one in recipes], 1)
    levels = tuple(replace(level, rows=level.rows or 1) for level in format.levels)
    return Parts(named(replace(format, levels=levels)), made)


def _every(whole: Parts, begin: int, end: int, every: int) -> Parts | str:
    """Return the parts of rows `begin` to `end` of each run of `every` rows of a stack."""
    parts = dict(whole.recipes)
    for part, made in parts.items():
        rows = whole.format.block(part)[0]
        if rows > 1:
            return f"{rows} rows of format '{whole.format.name}' stay together, and the weight takes other rows"
        if rows:
            parts[part] = take_slice(made, 1, begin, end, every=every)
    return Parts(whole.format, parts)
