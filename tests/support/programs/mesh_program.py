"""Programs on a mesh of two ranks, in text form."""

from ingot.ir.parse import parse_program
from ingot.ir.program import Program
from ingot.ir.types import Placement

PARTIAL = Placement("tp", "partial")
HEAD = "program p stage={stage}\nmesh tp=2\ndim T in [1, 8]\ndim pages in [1, 9]\n"
BODY = """input x: f32[T, 4]
param up: f32[6, 4] tp=shard(0, segments=[4, 8]) = shard(source(name="up"), axis="tp", dim=0, segments=[4, 8])
param down: f32[4, 2] tp=shard(1) = shard(source(name="down"), axis="tp", dim=1, segments=[])
%wide = ingot.linear(%x, %up) : f32[T, 6] tp=shard(1, segments=[4, 8])
%left = aten.slice.Tensor(%wide, 1, 0, 2) : f32[T, 2; 6, 1] tp=shard(1)
%right = aten.slice.Tensor(%wide, 1, 2, 6) : f32[T, 4; 6, 1] tp=shard(1)
%part = ingot.linear(%left, %down) : f32[T, 4] tp=partial  # layer 0
%total = ingot.all_reduce(%part, axis="tp") : f32[T, 4]
%joined = ingot.all_gather(%right, axis="tp", dim=1, parts=2) : f32[T, 8]
return y=%total, z=%joined
"""
STATES = """input k: f32[T, 2, 4]
input slots: i64[T]
state kv: paged_kv f32[pages, 2, 16, 1, 4] group=full unit=token tp=shard(3)
%own = ingot.take_part(%k, axis="tp", dim=1, parts=2) : f32[T, 1, 4] tp=shard(1)
%one = ingot.kv_append(%kv, %own, %own, %slots) : state<kv> tp=shard(3)
return kv=%one
"""


def shard(dim: int, *segments: int) -> Placement:
    return Placement("tp", "shard", dim, segments)


def program(body: str = BODY, stage: str = "SHARDED") -> Program:
    return parse_program(HEAD.format(stage=stage) + body)
