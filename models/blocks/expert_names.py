"""How checkpoints store the weights of experts: one by one, stacked, or as the rows of one matrix."""

from dataclasses import dataclass

from ingot.ir import recipe
from ingot.ir.recipe import Recipe
from ingot.models.params import Place


@dataclass(frozen=True)
class ExpertNames:
    """The names of the tensors of experts in a checkpoint, within the feed-forward part.

    A name with "{}" stands for one tensor per expert, with the expert's index in this place. Any other name is one
    tensor for all experts.

    gate, up, down   the matrices [width, hidden], [width, hidden] and [hidden, width] of an expert, stacked in a tensor
                     for all experts
    gate_up          one name for gate and up, with the rows of the gate first; None: they are separate
    transposed       whether the matrices are stored as [inputs, outputs]
    alternating      whether the rows of gate and up alternate in `gate_up` and its bias, the gate's row first
    as_rows          whether gate, up and the transposed down of all experts are one matrix [experts * width, hidden]
    gate_up_bias     the biases of gate and up [experts, 2 * width]
    down_bias        the biases of down [experts, hidden]
    """

    gate: str = "experts.{}.gate_proj.weight"
    up: str = "experts.{}.up_proj.weight"
    down: str = "experts.{}.down_proj.weight"
    gate_up: str | None = None
    transposed: bool = False
    alternating: bool = False
    as_rows: bool = False
    gate_up_bias: str = "experts.gate_up_proj_bias"
    down_bias: str = "experts.down_proj_bias"

    def of_gate_up(self, place: Place, experts: int, width: int) -> Recipe:
        """Return the recipe for the matrices of gate and up, the gate first: [experts, 2 * width, hidden].

        `place` is the prefix of the feed-forward part.
        """
        if self.gate_up is not None:
            return self._gate_first(self._matrices(place, self.gate_up, experts))
        names = self.gate, self.up
        if self.as_rows:
            return recipe.concat([_by_expert(place.source(name), experts, width) for name in names], dim=1)
        return recipe.concat([self._matrices(place, name, experts) for name in names], dim=1)

    def of_down(self, place: Place, experts: int, width: int) -> Recipe:
        """Return the recipe for the matrices of down: [experts, hidden, width]."""
        if self.as_rows:
            return recipe.permute(_by_expert(place.source(self.down), experts, width), (0, 2, 1))
        return self._matrices(place, self.down, experts)

    def of_biases(self, place: Place) -> tuple[Recipe, Recipe]:
        """Return the recipes for the biases of gate and up [experts, 2 * width], and of down [experts, hidden]."""
        return self._gate_first(place.source(self.gate_up_bias)), place.source(self.down_bias)

    def _matrices(self, place: Place, name: str, experts: int) -> Recipe:
        if "{}" in name:
            stored = recipe.stack([place.source(name.format(expert)) for expert in range(experts)])
        else:
            stored = place.source(name)
        return recipe.permute(stored, (0, 2, 1)) if self.transposed else stored

    def _gate_first(self, both: Recipe) -> Recipe:
        if not self.alternating:
            return both
        parts = [recipe.take_slice(both, 1, begin, begin + 1, every=2) for begin in (0, 1)]
        return recipe.concat(parts, dim=1)


def _by_expert(rows: Recipe, experts: int, width: int) -> Recipe:
    """Return the recipe for [experts, width, hidden] from the rows of all experts [experts * width, hidden]."""
    return recipe.stack([recipe.take_slice(rows, 0, one * width, (one + 1) * width) for one in range(experts)])
