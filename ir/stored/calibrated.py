"""What a calibration computed for the weights of a program: facts that the pass `quantize` reads."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ingot.ir.recipe import Recipe, cast, quantize, source
from ingot.ir.stored.recipes import multiply

# The tensors of a calibration are those of a further checkpoint of this name.
ALIAS = "calibrated"


@dataclass(frozen=True)
class ScaledTogether:
    """Weights and params [K] between which a calibration moved scales. Their names are those of the traced program."""

    weights: frozenset[str]
    vectors: frozenset[str]


@dataclass(frozen=True)
class CalibratedWeights:
    """The params that a calibration changes. Params and weights have their names in the traced program.

    formats     weight -> name of its storage format
    columns     weight -> tensor [1, K] of the factors of its columns, the scales of its input
    rows        weight -> tensor [N, 1] of the factors of its rows
    vectors     param [K] -> tensor [K] of its factors: the gain of a norm, or a bias
    together    params that must be changed at once, because scales go from one into another
    """

    formats: Mapping[str, str] = field(default_factory=dict)
    columns: Mapping[str, str] = field(default_factory=dict)
    rows: Mapping[str, str] = field(default_factory=dict)
    vectors: Mapping[str, str] = field(default_factory=dict)
    together: tuple[ScaledTogether, ...] = ()

    def parts(self, weight: str, recipe: Recipe, parts: tuple[str, ...]) -> dict[str, Recipe]:
        """Return the recipes of the tensors that store a weight, by part name. `recipe` makes the weight.

        `parts` are the names of the parts of its format.
        """
        if weight in self.rows:
            recipe = multiply(recipe, stored(self.rows[weight]))
        if weight in self.columns:
            recipe = multiply(recipe, stored(self.columns[weight]))
        return quantize(recipe, self.formats[weight], {part: stored(part_tensor(weight, part)) for part in parts})

    def vector(self, param: str, recipe: Recipe, dtype: torch.dtype) -> Recipe:
        """Return the recipe of a param [K] that `vectors` lists. `recipe` makes the param without factors."""
        return cast(multiply(recipe, stored(self.vectors[param])), dtype)


def part_tensor(weight: str, part: str) -> str:
    """Return the name of the calibration's tensor for one part of a weight."""
    return f"{weight}.{part}"


def stored(tensor: str) -> Recipe:
    """Return the recipe that reads a tensor of the calibration."""
    return source(f"{ALIAS}:{tensor}")
