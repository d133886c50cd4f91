"""Edits of what types and recipes say: sizes, dtypes, placements, and what a param is made of."""

import random
from dataclasses import replace

import torch

from ingot.ir.program import Program
from ingot.ir.recipe import Recipe, affine
from ingot.ir.types import Split, TensorType
from semantic_edits.places import calls_of, pick


def another_recipe(program: Program, draw: random.Random) -> Program | None:
    """A step of a param's recipe has another attribute, reads another tensor, or follows."""
    changed = program.copy()
    if not changed.params:
        return None
    name = draw.choice(list(changed.params))
    spec = changed.params[name]
    changed.params[name] = replace(spec, recipe=_edited_recipe(spec.recipe, draw))
    return changed


def _edited_recipe(recipe: Recipe, draw: random.Random) -> Recipe:
    if recipe.inputs and draw.random() < 0.7:
        place = draw.randrange(len(recipe.inputs))
        inputs = list(recipe.inputs)
        inputs[place] = _edited_recipe(inputs[place], draw)
        return replace(recipe, inputs=tuple(inputs))
    if len(recipe.inputs) > 1 and recipe.inputs[0] != recipe.inputs[-1] and draw.random() < 0.3:
        return replace(recipe, inputs=recipe.inputs[::-1])
    found = [(name, value) for name, value in recipe.attrs if isinstance(value, int | float | str)]
    if not found or draw.random() < 0.3:
        return affine(recipe, draw.choice([0.5, 1.0, 2.0]), draw.choice([0.0, 1.0]))
    name, value = draw.choice(found)
    other = f"{value}.x" if isinstance(value, str) else value + 1
    return replace(recipe, attrs=tuple((key, other if key == name else old) for key, old in recipe.attrs))


def other_type(found: TensorType, draw: random.Random) -> TensorType:
    kind = draw.choice(["dtype", "shape", "strides"])
    if kind == "shape" and found.shape and isinstance(found.shape[-1], int):
        return TensorType(found.dtype, (*found.shape[:-1], found.shape[-1] + 1))
    if kind == "strides" and len(found.shape) > 1:
        strides = tuple(range(3, 3 + len(found.shape)))
        return TensorType(found.dtype, found.shape, strides)
    return TensorType(torch.float64 if found.dtype is not torch.float64 else torch.int32, found.shape, found.strides)


def another_input_type(program: Program, draw: random.Random) -> Program | None:
    changed = program.copy()
    node = draw.choice(list(changed.placeholders("input")))
    node.meta = {**node.meta, "type": other_type(node.meta["type"], draw)}
    return changed


def another_param_type(program: Program, draw: random.Random) -> Program | None:
    changed = program.copy()
    node = draw.choice(list(changed.placeholders("param")))
    spec = changed.params[str(node.target)]
    changed.params[str(node.target)] = spec = replace(spec, type=other_type(spec.type, draw))
    node.meta = {**node.meta, "type": spec.type}
    return changed


def another_result_type(program: Program, draw: random.Random) -> Program | None:
    """A call declares another dtype, shape or strides than it has."""
    changed = program.copy()
    found = [node for node in calls_of(changed) if isinstance(node.meta["type"], TensorType)]
    node = draw.choice(found)
    node.meta = {**node.meta, "type": other_type(node.meta["type"], draw)}
    return changed


def another_placement(program: Program, draw: random.Random) -> Program | None:
    changed = program.copy()
    name = draw.choice(list(changed.params))
    spec = changed.params[name]
    split = Split("tp", len(spec.type.shape) - 1, (1, 2))
    changed.params[name] = replace(spec, split=None if spec.split and draw.random() < 0.5 else split)
    return changed


def another_result_placement(program: Program, draw: random.Random) -> Program | None:
    changed = program.copy()
    node = pick([node for node in calls_of(changed) if node.meta.get("placement")], draw)
    if node is None:
        return None
    node.meta = {**node.meta, "placement": ()}
    return changed
