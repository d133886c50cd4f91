"""RMS norm and layer norm, with the ways in which checkpoints store their weights."""

import math
from dataclasses import dataclass, replace

import torch

from ingot.ir import ops, recipe
from ingot.ir.recipe import Recipe
from ingot.ir.types import Split
from ingot.models.blocks.block import Block
from ingot.models.params import Place, parameter


@dataclass(frozen=True)
class NormSpec:
    """An RMS norm or layer norm with the epsilon `eps`. Its gains are its weights, which multiply the result.

    kind     "rms" or "layer"
    gains    whether the checkpoint stores gains. If not, they are ones.
    wide     True: gains are float32, and only the final result is rounded. False: gains have the model's dtype.
    offset   added to the stored gains, such as 1.0 in Gemma
    bias     whether a layer norm has a bias
    stored   name of the norm in the checkpoint
    apart    whether each head's gains are a separate tensor, named `stored`.0, `stored`.1 and so on
    """

    eps: float
    kind: str = "rms"
    gains: bool = True
    wide: bool = False
    offset: float = 0.0
    bias: bool = False
    stored: str = "norm"
    apart: bool = False

    def named(self, stored: str) -> "NormSpec":
        """Return a copy of this spec with the checkpoint name `stored`."""
        return replace(self, stored=stored)

    def tensor(self, place: Place, name: str, shape: tuple[int, ...]) -> Recipe:
        """Return the recipe for the norm's tensor `name`: how to read it from the checkpoint.

        `name` is "weight" or "bias", and `shape` the tensor's shape. `place` is the norm's prefix. With `apart`, the
        tensor is a stack of one stored tensor per head.
        """
        if not self.apart:
            return place.source(name)
        return recipe.stack([(place / head).source(name) for head in range(shape[0])])

    def made(self, place: Place, shape: tuple[int, ...]) -> Recipe:
        """Return the recipe for the norm's gains (weights) of this shape: how they are made.

        They are the stored gains plus the offset, or ones. `place` is the norm's prefix in the checkpoint.
        """
        if not self.gains:
            return recipe.reshape(recipe.table(kind="ones", size=math.prod(shape)), shape)
        stored = self.tensor(place, "weight", shape)
        if not self.offset:
            return stored
        # Wide gains are added in float32: 1 + w in bfloat16 would lose most of w.
        return recipe.affine(recipe.cast(stored, torch.float32) if self.wide else stored, 1.0, self.offset)


class Norm(Block):
    """An RMS norm or layer norm over the last axis: x [..., *shape] -> [..., *shape].

    shape   shape of the gains: [hidden], or [heads, head_dim] for a norm with separate gains for each head
    place   prefix of the block that has the norm, in the checkpoint
    split   how a mesh divides the gains; None: each rank has all of them
    """

    def __init__(self, spec: NormSpec, place: Place, *shape: int, split: Split | None = None) -> None:
        super().__init__()
        self.spec = spec
        place, dtype = place / spec.stored, torch.float32 if spec.wide or not spec.gains else place.dtype
        self.weight = parameter(shape, spec.made(place, shape), dtype, split)
        self.bias = parameter(shape, spec.tensor(place, "bias", shape), dtype, split) if spec.bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.spec.kind == "rms":
            return ops.rms_norm(x, self.weight, eps=self.spec.eps)
        bias = () if self.bias is None else (self.bias,)
        return ops.layer_norm(x, self.weight, *bias, eps=self.spec.eps)
