"""A layer: blocks that add their results to the residual stream, with norms before and after."""

from dataclasses import dataclass
from typing import Protocol

import torch

from ingot.models.blocks.block import Block
from ingot.models.blocks.linear import LinearsFirst, merges
from ingot.models.blocks.norm import Norm, NormSpec
from ingot.models.blocks.positions import Positions
from ingot.models.params import Place


class BlockSpec(Protocol):
    """The interface of specs of a layer's parts, such as attention or a feed-forward part."""

    def build(self, place: Place, hidden: int, layer: int) -> Block:
        """Return the part as a module: hidden states x [T, hidden] and Positions -> [T, hidden].

        `place` is the prefix of the layer's tensors in the checkpoint. `layer` is the layer's index.
        """


@dataclass(frozen=True)
class BranchSpec:
    """One part of a layer, such as attention, with the norms around it. None means no norm.

    name          prefix of its parameters' names in the module
    block         the part itself
    norm          norm of its input
    post_norm     norm of its result, before it is added to the residual stream
    stream_norm   norm of the residual stream after the addition, as in post-norm transformers
    """

    name: str
    block: BlockSpec
    norm: NormSpec | None = None
    post_norm: NormSpec | None = None
    stream_norm: NormSpec | None = None


@dataclass(frozen=True)
class LayerSpec:
    """A layer: parts such as attention, with their norms. Each adds its result to the residual stream.

    branches    the parts, in order; may be empty
    parallel    True: all parts read the layer's input. A part without a norm reads the normed input of the part before
                it. No part may have a stream_norm. False: each part reads the stream after the part before it.
    scale       a factor on each part's result; None: no factor
    onto_norm   True: each result is added to the part's normed input, not to the stream. The sum is the new stream.
    """

    branches: tuple[BranchSpec, ...]
    parallel: bool = False
    scale: float | None = None
    onto_norm: bool = False

    def build(self, place: Place, hidden: int, index: int) -> "Layer":
        return Layer(self, place, hidden, index)


@dataclass(frozen=True)
class _Branch:
    norm: Norm | None
    block: Block
    post_norm: Norm | None
    stream_norm: Norm | None

    @property
    def begins_with_rms_norm(self) -> bool:
        return self.norm is not None and self.norm.spec.kind == "rms"


class Layer(Block):
    """A layer of a decoder: residual stream [T, hidden] before it -> residual stream [T, hidden] after it.

    Its parameters are named by the parts: "attention.q.weight", "attention_norm.weight", "attention_post_norm.weight"
    and "attention_stream_norm.weight" for a part named "attention".
    """

    def __init__(self, spec: LayerSpec, place: Place, hidden: int, index: int) -> None:
        super().__init__()
        self.spec = spec
        for one in spec.branches:
            self.add_module(one.name, one.block.build(place, hidden, index))
        norms = {f"{one.name}_norm": one.norm for one in spec.branches}
        norms |= {f"{one.name}_post_norm": one.post_norm for one in spec.branches}
        norms |= {f"{one.name}_stream_norm": one.stream_norm for one in spec.branches}
        for name, norm in norms.items():
            self.add_module(name, Norm(norm, place, hidden) if norm is not None else None)

    @property
    def branches(self) -> list[_Branch]:
        names = [one.name for one in self.spec.branches]
        ends = ("_norm", "", "_post_norm", "_stream_norm")
        return [_Branch(*(getattr(self, name + end) for end in ends)) for name in names]

    @property
    def begins_with_rms_norm(self) -> bool:
        return self.branches[0].begins_with_rms_norm

    def forward(self, h: torch.Tensor, at: Positions) -> torch.Tensor:
        if self.spec.parallel:
            return self._in_parallel(h, at)
        for one in self.branches:
            x = one.norm(h) if one.norm is not None else h
            h = (x if self.spec.onto_norm else h) + self._result(one, x, at)
            h = one.stream_norm(h) if one.stream_norm is not None else h
        return h

    def _in_parallel(self, h: torch.Tensor, at: Positions) -> torch.Tensor:
        total = x = h
        for one in self.branches:
            x = one.norm(h) if one.norm is not None else x
            total = total + self._result(one, x, at)
        return total

    def _result(self, one: _Branch, x: torch.Tensor, at: Positions) -> torch.Tensor:
        result = one.block(x, at)
        if one.post_norm is not None:
            result = one.post_norm(result)
        return result if self.spec.scale is None else result * self.spec.scale

    def matches(self) -> dict[str, int]:
        """Return how many rewrites passes must apply across the layer's parts: pass name -> count.

        In a sequential layer, the add after a part is fused with the RMS norm of the next part. In a parallel layer
        with one norm, the first linears of all parts read the same value and are merged.
        """
        if not self.spec.parallel:
            return {"fuse-add-rms-norm": sum(one.begins_with_rms_norm for one in self.branches[1:])}
        if any(one.norm is not None for one in self.branches[1:]):
            return {}
        first = [one.block.first for one in self.branches if isinstance(one.block, LinearsFirst)]
        return {"merge-linears": merges(sum(first, ())) - sum(map(merges, first))}
