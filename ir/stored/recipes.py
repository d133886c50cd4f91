"""Recipes of the steps in `ingot.ir.stored.elements`, which readers of quantized checkpoints use."""

from dataclasses import replace

import torch

from ingot.ir.recipe import Attr, Recipe
from ingot.ir.stored.gguf_blocks import BLOCK_TYPES
from ingot.ir.types import DTYPE_NAMES


def _step(step: str, *inputs: Recipe, **attrs: Attr) -> Recipe:
    return Recipe(step, inputs, tuple(sorted(attrs.items())))


def unpack(words: Recipe, bits: int, dim: int, size: int = 0, order: tuple[int, ...] = ()) -> Recipe:
    """Return a recipe for the codes of `bits` bits that integers hold along the axis `dim`, the lowest bits first.

    `size` is the number of codes; 0: all. With `order`, code i of each run of len(order) codes is the stored code
    order[i].
    """
    return _step("unpack", words, bits=bits, dim=dim, size=size, order=order)


def pack(codes: Recipe, packing: str) -> Recipe:
    """Return a recipe that stores a matrix of codes in the order of a packing, such as "low_first"."""
    return codes if packing == "plain" else _step("pack", codes, packing=packing)


def bitcast(recipe: Recipe, dtype: torch.dtype) -> Recipe:
    """Return a recipe that reads the same bits as numbers of another dtype with as many bits."""
    return _step("bitcast", recipe, dtype=DTYPE_NAMES[dtype])


def shift(codes: Recipe, add: int, bits: int) -> Recipe:
    """Return a recipe for `(code + add) mod 2**bits`, as u8."""
    return _step("shift", codes, add=add, bits=bits)


def group_order(groups: Recipe, size: int) -> Recipe:
    """Return a recipe for the columns of a weight, sorted by their group. Each group has `size` columns."""
    return _step("group_order", groups, size=size)


def gather(recipe: Recipe, order: Recipe, dim: int) -> Recipe:
    """Return a recipe for the entries `order` of the axis `dim`, in that order."""
    return _step("gather", recipe, order, dim=dim)


def check_scales(scales: Recipe, zero: bool = False) -> Recipe:
    """Return a recipe that fails if a scale is NaN, infinite, subnormal, or zero. With `zero`, it may be zero."""
    return _step("check_scales", scales, zero=zero)


def multiply(left: Recipe, right: Recipe) -> Recipe:
    """Return a recipe for the product in float32, where axes of size 1 are repeated."""
    return _step("multiply", left, right)


def reciprocal(recipe: Recipe) -> Recipe:
    """Return a recipe for 1 / x in float32."""
    return _step("reciprocal", recipe)


def gguf_blocks(rows: Recipe, kind: str) -> dict[str, Recipe]:
    """Return recipes for the codes, scales and offsets of rows of GGUF's blocks, by part name.

    `rows` is u8[N, bytes], and `kind` the type of its blocks, such as "Q4_K". Types without offsets lack these.
    """
    step = _step("gguf_blocks", rows, type=kind)
    parts = ("weight", "scales", "offsets")[: 2 + BLOCK_TYPES[kind].offsets]
    return {part: replace(step, output=part) for part in parts}


def lookup(table: Recipe, codes: Recipe) -> Recipe:
    """Return a recipe for the entries of `table` at the places `codes`."""
    return _step("lookup", table, codes)
