"""The positions of a step's tokens, and rotary embeddings: their tables, and the rotation of heads."""

from dataclasses import dataclass, field

import torch
from torch import nn

from ingot.ir import ops, recipe
from ingot.models.config import RopeSpec
from ingot.models.params import parameter


@dataclass(frozen=True)
class Positions:
    """The positions of a step's tokens, an argument of every layer.

    positions    i32[T], each token's index in its sequence
    token_seqs   i32[T], the index of each token's sequence
    ropes        the model's rotary tables
    cached       keys and values [T, kv_heads, head_dim] by the index of the layer that caches them, for later layers
                 that attend to the same cache
    """

    positions: torch.Tensor
    token_seqs: torch.Tensor
    ropes: tuple[torch.Tensor, ...] = ()
    cached: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


def rope_table(rope: RopeSpec, max_seq_len: int) -> nn.Parameter:
    """Return the table of cosines and sines of a rotary embedding, a parameter f32[max_seq_len, rotary_dim].

    Elements of a head past `rotary_dim` are not rotated.
    """
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
    """The rotary embedding of an attention. It uses the model's rotary table number `table`.

    It rotates pairs of elements (i, i + rotary_dim / 2), or adjacent elements with `interleaved`.
    """

    table: int = 0
    interleaved: bool = False

    def rotate(self, heads: torch.Tensor, at: Positions) -> torch.Tensor:
        """Return q or k, `heads` [T, heads, head_dim], rotated by the positions of the tokens."""
        order = {"interleaved": True} if self.interleaved else {}
        return ops.rope(heads, at.positions, at.ropes[self.table], **order)
