"""Where the tokens of a step stand, and rotary embeddings: tables, and what rotates heads by them."""

from dataclasses import dataclass, field

import torch
from torch import nn

from ingot.ir import ops, recipe
from ingot.models.config import RopeSpec
from ingot.models.params import parameter


@dataclass(frozen=True)
class Positions:
    """Of each token fed its index in its sequence and that sequence, i32[T]; the model's rotary tables.

    `cached` holds keys and values [T, kv_heads, head_dim] by the layer whose cache gets them: for layers after it that
    attend to the same.
    """

    positions: torch.Tensor
    token_seqs: torch.Tensor
    ropes: tuple[torch.Tensor, ...] = ()
    cached: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


def rope_table(rope: RopeSpec, max_seq_len: int) -> nn.Parameter:
    """The rotary table f32[max_seq_len, rotary_dim]. What a head has beyond `rotary_dim` elements is not rotated."""
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
    """Rotates heads by the model's table `table`; pairs are halves of a head, or neighbours where `interleaved`."""

    table: int = 0
    interleaved: bool = False

    def rotate(self, heads: torch.Tensor, at: Positions) -> torch.Tensor:
        """heads [T, heads, head_dim] -> the same shape."""
        order = {"interleaved": True} if self.interleaved else {}
        return ops.rope(heads, at.positions, at.ropes[self.table], **order)
