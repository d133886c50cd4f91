"""The positions of a step's tokens, and what depends on them: rotary embeddings, and scales of queries."""

from dataclasses import dataclass, field

import torch
from torch import nn

from ingot.ir import ops, recipe
from ingot.models.config import RopeSpec
from ingot.models.params import parameter


@dataclass(frozen=True)
class Positions:
    """The argument `at` of every layer: positions of the step's tokens, with the rotary tables.

    positions    i32[T], each token's index in its sequence
    token_seqs   i32[T], the index of each token's sequence
    ropes        the model's rotary tables
    cached       layer index -> (keys, values) of the step's tokens, each [T, kv_heads, head_dim]. Later layers that
                 share the layer's cache read them.
    shortcuts    layer index -> a result [T, hidden] of the layer, which a later layer adds
    """

    positions: torch.Tensor
    token_seqs: torch.Tensor
    ropes: tuple[torch.Tensor, ...] = ()
    cached: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    shortcuts: dict[int, torch.Tensor] = field(default_factory=dict)


def rope_table(rope: RopeSpec, max_seq_len: int) -> nn.Parameter:
    """Return the table of cosines and sines of a rotary embedding, a parameter f32[max_seq_len, rotary_dim]."""
    made = recipe.table(
        kind="rope",
        rope_type=rope.rope_type,
        positions=max_seq_len,
        theta=rope.theta,
        rotary_dim=rope.rotary_dim,
        **dict(rope.constants),
    )
    return parameter((max_seq_len, rope.rotary_dim), made, torch.float32)


@dataclass(frozen=True)
class RotarySpec:
    """The rotary embedding of an attention.

    table         index of the rotary table in the model
    interleaved   True: it rotates pairs of adjacent elements. False: it rotates elements i and i + rotary_dim / 2.
    """

    table: int = 0
    interleaved: bool = False

    def rotate(self, heads: torch.Tensor, at: Positions) -> torch.Tensor:
        """Return the heads of q or k [T, heads, head_dim], rotated by the tokens' positions."""
        order = {"interleaved": True} if self.interleaved else {}
        return ops.rope(heads, at.positions, at.ropes[self.table], **order)


@dataclass(frozen=True)
class PositionScaleSpec:
    """A factor on the queries of an attention, which grows with the position: `1 + strength * ln(1 + n)`.

    n counts the whole periods before the position.

    period     number of positions in a period
    strength   how much the factor grows
    shift      added to the position
    """

    period: int
    strength: float
    shift: int = 0

    def scale(self, heads: torch.Tensor, at: Positions) -> torch.Tensor:
        """Return the heads of q [T, heads, head_dim], scaled by the tokens' positions."""
        more = {"shift": self.shift} if self.shift else {}
        return ops.scale_by_position(heads, at.positions, period=self.period, strength=self.strength, **more)
