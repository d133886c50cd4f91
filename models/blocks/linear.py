"""A linear map with a weight of the checkpoint, and blocks that begin with several."""

from collections import Counter

import torch

from ingot.ir import ops
from ingot.ir.types import Split
from ingot.models.blocks.block import Block
from ingot.models.params import Place, parameter


class Linear(Block):
    """x [T, inputs] -> [T, outputs]. A bias is split as the outputs are, and whole where inputs are split."""

    def __init__(
        self, place: Place, inputs: int, outputs: int, *, bias: bool = False, split: Split | None = None
    ) -> None:
        super().__init__()
        of_bias = split if split is not None and split.dim == 0 else None
        self.weight = parameter((outputs, inputs), place.matrix("weight"), place.dtype, split)
        self.bias = parameter((outputs,), place.source("bias"), place.dtype, of_bias) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.linear(x, self.weight, self.bias)


class LinearsFirst(Block):
    """A block that begins with the linears `first`, which all read what the block reads: they are merged."""

    first: tuple[Linear, ...] = ()

    def matches(self) -> dict[str, int]:
        return {"merge-linears": merges(self.first)}


def merges(linears: tuple[Linear, ...]) -> int:
    """How often linears that read one value are merged: those with a bias, and those without, two or more each."""
    alike = Counter(linear.bias is None for linear in linears)
    return sum(count > 1 for count in alike.values())
