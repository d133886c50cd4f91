"""A linear map, and blocks that begin with several linear maps."""

from collections import Counter

import torch

from ingot.ir import ops
from ingot.ir.types import Split
from ingot.models.blocks.block import Block
from ingot.models.params import Place, parameter


class Linear(Block):
    """A linear map: x [T, inputs] -> [T, outputs]. `place` is the prefix of its tensors in the checkpoint.

    `split` says how a mesh divides the weight [outputs, inputs]; None: each rank has all of it. A split of the outputs
    divides the bias too.
    """

    def __init__(
        self, place: Place, inputs: int, outputs: int, *, bias: bool = False, split: Split | None = None
    ) -> None:
        super().__init__()
        self.split = split
        of_bias = split if split is not None and split.dim == 0 else None
        self.weight = parameter((outputs, inputs), place.matrix("weight"), place.dtype, split)
        self.bias = parameter((outputs,), place.source("bias"), place.dtype, of_bias) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.linear(x, self.weight, self.bias)


class LinearsFirst(Block):
    """A block that begins with several linears of the same input, such as q, k and v of attention.

    `first` holds these linears. The pass merge-linears merges them.
    """

    first: tuple[Linear, ...] = ()

    def matches(self) -> dict[str, int]:
        return {"merge-linears": merges(self.first)}


def merges(linears: tuple[Linear, ...]) -> int:
    """Return how many merged linears the pass merge-linears must make of linears with the same input.

    Linears with a bias become one, and linears without a bias become another. So do linears that a mesh splits, and
    linears that it does not split. A single linear is not merged.
    """
    kinds = Counter((linear.bias is None, linear.split is None) for linear in linears)
    return sum(count > 1 for count in kinds.values())
