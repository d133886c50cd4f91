"""The feed-forward part (MLP) of a layer: gated as in Llama, or plain as in GPT-2."""

from dataclasses import dataclass

import torch

from ingot.ir import ops
from ingot.ir.types import Split
from ingot.models.blocks.block import Block
from ingot.models.blocks.linear import Linear, LinearsFirst
from ingot.models.blocks.positions import Positions
from ingot.models.params import Place


@dataclass(frozen=True)
class GatedNames:
    """The names of a gated feed-forward part's tensors in the checkpoint.

    place            its prefix within the layer
    gate, up, down   names of the three linears
    merged           name of one tensor that holds gate and up; None: they are separate
    """

    place: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    merged: str | None = None

    def gate_and_up(self, place: Place, width: int) -> list[Place]:
        """Return the locations of gate and up in the checkpoint. Each has `width` rows.

        `place` is the location of the feed-forward part.
        """
        if self.merged is not None:
            return (place / self.merged).split(width, width)
        return [place / self.gate, place / self.up]


@dataclass(frozen=True)
class GatedSpec:
    """A gated feed-forward part: down(activation(gate(x)) * up(x)).

    width        number of outputs of gate and of up
    activation   "silu", "gelu" or "gelu_tanh"
    cutoff       makes the gates sparse before the activation: relu(gate - mean - `cutoff` * std), with mean and
                 standard deviation of the token's gates; None: gates stay as they are
    bias         whether all three linears have biases
    down_bias    whether down has a bias even without `bias`
    names        names of the tensors in the checkpoint
    """

    width: int
    activation: str = "silu"
    cutoff: float | None = None
    bias: bool = False
    down_bias: bool = False
    names: GatedNames = GatedNames()

    def build(self, place: Place, hidden: int, layer: int) -> "Gated":
        return Gated(self, place / self.names.place, hidden)


class Gated(LinearsFirst):
    """A gated feed-forward part (MLP): x [T, hidden] -> [T, hidden]."""

    def __init__(self, spec: GatedSpec, place: Place, hidden: int) -> None:
        super().__init__()
        self.activation, self.cutoff = spec.activation, spec.cutoff
        gate, up = spec.names.gate_and_up(place, spec.width)
        self.gate = Linear(gate, hidden, spec.width, bias=spec.bias, split=Split("tp", 0))
        self.up = Linear(up, hidden, spec.width, bias=spec.bias, split=Split("tp", 0))
        down_bias = spec.bias or spec.down_bias
        self.down = Linear(place / spec.names.down, spec.width, hidden, bias=down_bias, split=Split("tp", 1))
        self.first = (self.gate, self.up)

    def forward(self, x: torch.Tensor, at: Positions) -> torch.Tensor:
        gate, up = self.gate(x), self.up(x)
        if self.cutoff is not None:
            gate = ops.gaussian_top_k(gate, deviations=self.cutoff)
        if self.activation == "silu":
            return self.down(ops.silu_mul(gate, up))
        return self.down(ops.gelu_mul(gate, up, approximate="tanh" if self.activation == "gelu_tanh" else "none"))


@dataclass(frozen=True)
class PlainNames:
    """The names of a plain feed-forward part's tensors in the checkpoint.

    place      its prefix within the layer; "": the linears have no such prefix
    up, down   names of the two linears
    """

    place: str = "mlp"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True)
class PlainSpec:
    """A plain feed-forward part: down(activation(up(x))).

    width        number of outputs of up
    activation   an activation of the op `activate`, such as "gelu"
    bias         whether both linears have biases
    names        names of the tensors in the checkpoint
    """

    width: int
    activation: str = "gelu"
    bias: bool = False
    names: PlainNames = PlainNames()

    def build(self, place: Place, hidden: int, layer: int) -> "Plain":
        return Plain(self, place / self.names.place, hidden)


class Plain(Block):
    """A plain feed-forward part (MLP): x [T, hidden] -> [T, hidden]."""

    def __init__(self, spec: PlainSpec, place: Place, hidden: int) -> None:
        super().__init__()
        self.activation = spec.activation
        self.up = Linear(place / spec.names.up, hidden, spec.width, bias=spec.bias, split=Split("tp", 0))
        self.down = Linear(place / spec.names.down, spec.width, hidden, bias=spec.bias, split=Split("tp", 1))

    def forward(self, x: torch.Tensor, at: Positions) -> torch.Tensor:
        return self.down(ops.activate(self.up(x), kind=self.activation))
