"""Make the params of programs from a checkpoint's tensors; execute each recipe once."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ingot.ir.mesh import Rank, ranks
from ingot.ir.program import Program
from ingot.ir.recipe import Recipe


@dataclass
class Params:
    """Computes a program's params (its weights) from the checkpoint. The result has a mapping from name to tensor for
    each rank.

    `read` takes a name and returns that checkpoint tensor.
    """

    read: Callable[[str], torch.Tensor]
    _made: dict[tuple[Recipe, Rank | None], torch.Tensor] = field(default_factory=dict)

    def __call__(self, program: Program) -> list[dict[str, torch.Tensor]]:
        return [self._of_rank(program, rank) for rank in (ranks(program.mesh) if program.mesh else (None,))]

    def _of_rank(self, program: Program, rank: Rank | None) -> dict[str, torch.Tensor]:
        made = {}
        for name, spec in program.params.items():
            key = spec.recipe, rank
            if key not in self._made:
                self._made[key] = (spec.recipe.for_rank(rank) if rank else spec.recipe).execute(self.read)
            made[name] = self._made[key]
        return made
