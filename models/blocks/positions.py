"""The positions of a step's tokens, and rotary embeddings: tables, and the rotation of heads."""

from dataclasses import dataclass, field

import torch
from torch import nn

from ingot.ir import ops, recipe
from ingot.models.config import RopeSpec
from ingot.models.params import parameter


@dataclass(frozen=True)
class Positions:
    """The positions argument of layers.

    positions    i32[T], each token's index in its sequence
    token_seqs   i32[T], each token's sequence
    ropes        the model's rotary tables
    cached       keys and values [T, kv_heads, head_dim] by the layer that stores them in its cache, for later layers
                 that attend to the same cache
    """

    positions: torch.Tensor
    token_seqs: torch.Tensor
    ropes: tuple[torch.Tensor, ...] = ()
    cached: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


def rope_table(rope: RopeSpec, max_seq_len: int) -> nn.Parameter:
    """Return the rotary table f32[max_seq_len, rotary_dim]. Elements of a head past `rotary_dim` are not rotated."""
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
    """Rotates heads by the model's rotary table number `table`. Pairs are (i, i + rotary_dim / 2), or neighbours with
    `interleaved`."""

    table: int = 0
    interleaved: bool = False

    def rotate(self, heads: torch.Tensor, at: Positions) -> torch.Tensor:
        """Rotate heads [T, heads, head_dim] -> the same shape."""
        order = {"interleaved": True} if self.interleaved else {}
        return ops.rope(heads, at.positions, at.ropes[self.table], **order)
