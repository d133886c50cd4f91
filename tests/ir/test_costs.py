"""What calls cost, by hand and by torch's own counter."""

import math
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ingot.ir.costs import call_cost
from ingot.ir.masks import Mask
from ingot.ir.ops import OPS
from ingot.ir.ops.registry import Cost
from ingot.ir.parse import parse_program

BF16 = torch.bfloat16


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def counted(name: str, *args: Any, **kwargs: Any) -> int:
    """Flops of the products in an op's reference, as torch counts them."""
    with FlopCounterMode(display=False) as counter:
        OPS[name].reference(*args, **kwargs)
    return int(counter.get_total_flops())


def test_linear() -> None:
    args = randn(3, 16, dtype=BF16), randn(8, 16, dtype=BF16)
    assert OPS["linear"].cost(*args) == Cost(2 * 3 * 8 * 16, 2 * (3 * 16 + 8 * 16 + 3 * 8))
    assert OPS["linear"].cost(*args).flops == counted("linear", *args)
    biased = OPS["linear"].cost(*args, randn(8, dtype=BF16))
    assert biased.bytes == OPS["linear"].cost(*args).bytes + 2 * 8


MASKS = ["causal", *(f"window_{size}" for size in (1, 7, 20, 40, 100)), "chunked_7", "chunked_16", "bidirectional"]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (3, 1), (1, 5), (2, 32), (1, 48)])
def test_attention_over_pages(mask: str, batch: int, tokens: int) -> None:
    """Full pages, each sequence at its end: the mask by hand, torch's products where nothing is masked."""
    page, pages, heads, kv_heads, width = 16, 3, 4, 2, 8
    length = page * pages
    q, kv = randn(batch * tokens, heads, width), randn(batch * pages, 2, page, kv_heads, width)
    table = torch.arange(batch * pages, dtype=torch.int32).view(batch, pages)
    rest = ints(*range(0, batch * tokens, tokens)), ints(*[tokens] * batch), ints(*[length] * batch)
    options = {"scale": 1.0, "mask": mask}
    cost = OPS["paged_attention"].cost(q, kv, table, *rest, **options)
    by = Mask.named(mask)
    places = range(length - tokens, length)
    seen = [range(max(0, by.first(place)), min(by.end(place), length)) for place in places]
    assert cost.flops == pytest.approx(4 * heads * width * batch * sum(map(len, seen)))
    read = len(set().union(*seen))
    assert cost.bytes == 4 * (2 * q.numel() + batch * read * 2 * kv_heads * width + table.numel() + 3 * batch)
    if tokens == 1 and len(seen[0]) == length:
        assert cost.flops == counted("paged_attention", q, kv, table, *rest, **options)


def test_rows_of_a_table_alone() -> None:
    tokens = ints(1, 2, 3)
    assert OPS["embedding"].cost(tokens, randn(1000, 8, dtype=BF16)) == Cost(0, 3 * 4 + 2 * 3 * 8 * 2)
    assert OPS["select_rows"].cost(randn(1000, 8), tokens) == Cost(0, 3 * 4 + 2 * 3 * 8 * 4)
    x, table = randn(3, 5, 16, dtype=BF16), randn(4096, 12)
    # Of 16 elements of a head 12 turn, each by two products and a sum; a row of the table for each token.
    assert OPS["rope"].cost(x, tokens, table) == Cost(3 * 5 * 12 * 3, 2 * 2 * 240 + 3 * 4 + 3 * 12 * 4)


def test_a_cache_takes_the_rows_that_are_written() -> None:
    kv, k, slots = randn(64, 2, 16, 2, 8), randn(3, 2, 8), torch.zeros(3, dtype=torch.int64)
    assert OPS["kv_append"].cost(kv, k, k, slots) == Cost(0, 4 * k.numel() * 4 + 3 * 8)
    q, table, norm = randn(3, 4, 8), randn(100, 8), randn(8)
    fused = OPS["qk_norm_rope_append"]
    plain = fused.cost(kv, q, k, k, slots.int(), table, slots, eps=0.0)
    moved = 2 * 4 * (q.numel() + 2 * k.numel()) + 3 * 4 + 3 * 8 * 4 + 3 * 8
    assert plain == Cost(3 * 8 * 3 * (4 + 2), moved)
    normed = fused.cost(kv, q, k, k, slots.int(), table, slots, norm, norm, eps=1e-6)
    assert normed == plain + Cost(q.numel() + k.numel(), 2 * 8 * 4)


def test_attention_with_its_cache_write_moves_q_once() -> None:
    kv, k, table = randn(64, 2, 16, 2, 8), randn(3, 2, 8), randn(100, 8)
    q, slots, lens = randn(3, 4, 8), torch.zeros(3, dtype=torch.int64), (torch.zeros(3, 9, dtype=torch.int32), ints(0))
    append = (kv, q, k, k, slots.int(), table, slots)
    pages = (*lens, ints(3), ints(9))
    parts = OPS["qk_norm_rope_append"].cost(*append, eps=0.0)
    parts += OPS["paged_attention"].cost(q, kv, *pages, scale=1.0, mask="window_20")
    fused = OPS["append_attention"].cost(*append, *pages, eps=0.0, scale=1.0, mask="window_20")
    assert fused == Cost(parts.flops, parts.bytes - 2 * q.numel() * 4)


def test_what_no_request_asks_for_costs_nothing_much() -> None:
    logits, rows = randn(2, 5000), torch.zeros(2, dtype=torch.int32)
    asked = (rows, rows.float(), rows.float(), rows.float(), torch.zeros(2, 16, dtype=torch.int32))
    counts = torch.zeros(64, 5000, dtype=torch.int32)
    assert OPS["top_logprobs"].cost(logits, rows, rows, rows) == Cost(0, 2 * 4 * (3 + 21 + 21 + 1))
    edited = (torch.zeros(64, 9999, dtype=torch.int32), rows, torch.zeros(64, dtype=torch.int32))
    knobs = (rows.float(), rows, rows.float(), rows.float(), rows.float(), rows.long(), rows)
    moved = 2 * (4 * 6 + 8) + 2 * 4 * (4 + 16 + 1) + 2 * 4
    assert OPS["sample"].cost(logits, *knobs, counts, *asked, *edited) == Cost(10_000, 4 * 10_000 + moved)
    assert OPS["sample"].cost(logits.bfloat16(), *knobs, counts, *asked, *edited) == Cost(10_000, 2 * 10_000 + moved)


def test_experts() -> None:
    x, weights, chosen = randn(2, 24), randn(2, 3), torch.tensor([[5, 1, 60], [2, 1, 9]], dtype=torch.int32)
    gate_up, down = randn(64, 40, 24), randn(64, 24, 20)
    cost = OPS["experts"].cost(x, weights, chosen, gate_up, down)
    assert cost.flops == 2 * 3 * (2 * 40 * 24 + 2 * 24 * 20)
    assert cost.flops == counted("experts", x, weights, chosen, gate_up, down)
    assert cost.bytes == 4 * (2 * x.numel() + 2 * 6 + 6 * (40 * 24 + 24 * 20))
    biased = OPS["experts"].cost(x, weights, chosen, gate_up, down, randn(64, 40), randn(64, 24))
    assert biased == Cost(cost.flops, cost.bytes + 4 * 6 * (40 + 24))
    many = OPS["experts"].cost(randn(100, 24), randn(100, 3), chosen.repeat(50, 1), gate_up, down)
    assert many.bytes == 4 * (2 * 2400 + 600 + 64 * (40 * 24 + 24 * 20))


def test_elementwise_by_default() -> None:
    x = randn(6, 40, dtype=BF16)
    assert OPS["rms_norm"].cost(x, randn(40, dtype=BF16), eps=1e-5) == Cost(240, 2 * (240 + 40 + 240))
    assert OPS["add_rms_norm"].cost(x, x, x[0], eps=1e-5) == Cost(480, 2 * (2 * 240 + 40 + 2 * 240))


TEXT = """\
program main stage=PLANNED bucket=any tokens=[1, 64] q_max=any
dim T in [1, 64]
dim B in [1, 8]
dim P in [1, 10]
dim pages in [1, 1000]
param norm: f32[8] = source(name="norm")
param up: f32[32, 8] = source(name="up")
input x: f32[T, 8]
region r0 @inductor {
  input in0: f32[T, 8]
  input in1: f32[8]
  input in2: f32[32, 8]
  %rms_norm = ingot.rms_norm(%in0, %in1, eps=1e-05) : f32[T, 8]
  %linear = ingot.linear(%rms_norm, %in2) : f32[T, 32]
  %slice_1 = aten.slice.Tensor(%linear, 1, 0, 16) : f32[T, 16; 32, 1]
  %slice_2 = aten.slice.Tensor(%linear, 1, 16, 32) : f32[T, 16; 32, 1]
  return out0=%slice_1, out1=%slice_2
}
%region_r0 = region.r0(%x, %norm, %up) : (f32[T, 16; 32, 1], f32[T, 16; 32, 1]) @inductor
%item = getitem(%region_r0, 0) : f32[T, 16; 32, 1]
%item_1 = getitem(%region_r0, 1) : f32[T, 16; 32, 1]
%silu_mul = ingot.silu_mul(%item, %item_1) : f32[T, 16] @reference
%add = aten.add.Tensor(%silu_mul, %silu_mul) : f32[T, 16] @reference
%mul = aten.mul.Tensor(%add, 2.0) : f32[T, 16] @reference
return y=%mul
"""


def test_calls_of_a_program() -> None:
    program = parse_program(TEXT)
    costs = {node.name: call_cost(node, program, {"T": 5, "B": 1, "P": 1}) for node in program.calls()}
    # Inside the region nothing but what is computed; outside, what goes in and comes out.
    inside = 5 * 8 + 2 * 5 * 32 * 8
    assert costs["region_r0"] == Cost(inside, 4 * (5 * 8 + 8 + 32 * 8 + 5 * 32))
    assert costs["item"] == costs["item_1"] == Cost(0, 0)
    assert costs["silu_mul"] == Cost(5 * 16, 4 * 3 * 5 * 16)
    assert costs["add"] == Cost(5 * 16, 4 * 3 * 5 * 16)
    assert costs["mul"] == Cost(5 * 16, 4 * 2 * 5 * 16)
    body = {
        node.name: call_cost(node, program.regions["r0"].body, {"T": 5}) for node in program.regions["r0"].body.calls()
    }
    assert body["slice_1"] == Cost(0, 0) and math.prod((5, 32, 8)) * 2 == body["linear"].flops


REGION = """
program main stage=PLANNED bucket=any tokens=[1, 64] q_max=any
dim T in [1, 64]
input x: f32[T, 8]
input weights: f32[T, 2]
input chosen: i32[T, 2]
input positions: i32[T]
param gate_up: f32[6, 32, 8] = source(name="gate_up")
param down: f32[6, 8, 16] = source(name="down")
param table: f32[100, 8] = source(name="table")
region r0 @triton {
  input in0: f32[T, 8]
  input in1: f32[T, 2]
  input in2: i32[T, 2]
  input in3: f32[6, 32, 8]
  input in4: f32[6, 8, 16]
  %experts = ingot.experts(%in0, %in1, %in2, %in3, %in4) : f32[T, 8]
  %add = aten.add.Tensor(%in0, %experts) : f32[T, 8]
  return out0=%add
}
region r1 @inductor {
  input in0: i32[T]
  input in1: f32[100, 8]
  %embedding = ingot.embedding(%in0, %in1) : f32[T, 8]
  %embedding_1 = ingot.embedding(%in0, %in1) : f32[T, 8]
  %add = aten.add.Tensor(%embedding, %embedding_1) : f32[T, 8]
  return out0=%add
}
%region_r0 = region.r0(%x, %weights, %chosen, %gate_up, %down) : f32[T, 8] @triton
%region_r1 = region.r1(%positions, %table) : f32[T, 8] @inductor
return y=%region_r0, z=%region_r1
"""


@pytest.mark.parametrize(("tokens", "experts"), [(1, 2), (2, 4), (5, 6)])
def test_a_region_counts_the_part_of_an_argument_that_it_reads(tokens: int, experts: int) -> None:
    """The weights of the experts that tokens choose, and the rows of a table, which two lookups read once."""
    program = parse_program(REGION)
    experts_and_add, lookups = (call_cost(node, program, {"T": tokens}) for node in program.calls())
    rows = 4 * (2 * tokens * 8 + 2 * tokens * 2)
    assert experts_and_add.bytes == rows + 4 * experts * (32 * 8 + 8 * 16)
    assert experts_and_add.flops == 6 * tokens * 2 * 8 * 16 + tokens * 8
    assert lookups.bytes == 4 * (tokens + 2 * tokens * 8)


SHARED = """
program main stage=PLANNED bucket=any tokens=[1, 64] q_max=any
dim T in [1, 64]
dim L in [1, 8]
input indices: i32[T]
input x: f32[T, 8]
input y: f32[T, 8]
input rows: i32[L]
input q: f32[T, 8, 16]
input k: f32[T, 4, 16]
param table: f32[100, 16] = source(name="table")
region r0 @inductor {
  input in0: i32[T]
  input in1: f32[100, 16]
  %embedding = ingot.embedding(%in0, %in1) : f32[T, 16]
  %add = aten.add.Tensor(%in1, %in1) : f32[100, 16]
  return out0=%embedding, out1=%add
}
region r1 @inductor {
  input in0: f32[T, 8, 16]
  input in1: f32[T, 4, 16]
  input in2: i32[T]
  input in3: f32[100, 16]
  %rope = ingot.rope(%in0, %in2, %in3) : f32[T, 8, 16]
  %rope_1 = ingot.rope(%in1, %in2, %in3) : f32[T, 4, 16]
  return out0=%rope, out1=%rope_1
}
region r2 @inductor {
  input in0: f32[T, 8]
  input in1: f32[T, 8]
  input in2: i32[L]
  %add = aten.add.Tensor(%in0, %in1) : f32[T, 8]
  %select_rows = ingot.select_rows(%add, %in2) : f32[L, 8]
  return out0=%select_rows
}
region r3 @inductor {
  input in0: i32[T]
  input in1: f32[100, 16]
  %slice_1 = aten.slice.Tensor(%in1, 1, 0, 8) : f32[100, 8; 16, 1]
  %mul = aten.mul.Tensor(%slice_1, 2.0) : f32[100, 8]
  %embedding = ingot.embedding(%in0, %in1) : f32[T, 16]
  return out0=%embedding, out1=%mul
}
%region_r0 = region.r0(%indices, %table) : (f32[T, 16], f32[100, 16]) @inductor
%region_r1 = region.r1(%q, %k, %indices, %table) : (f32[T, 8, 16], f32[T, 4, 16]) @inductor
%region_r2 = region.r2(%x, %y, %rows) : f32[L, 8] @inductor
%region_r3 = region.r3(%indices, %table) : (f32[T, 16], f32[100, 8]) @inductor
%r0_0 = getitem(%region_r0, 0) : f32[T, 16]
%r0_1 = getitem(%region_r0, 1) : f32[100, 16]
%r1_0 = getitem(%region_r1, 0) : f32[T, 8, 16]
%r1_1 = getitem(%region_r1, 1) : f32[T, 4, 16]
%r3_0 = getitem(%region_r3, 0) : f32[T, 16]
%r3_1 = getitem(%region_r3, 1) : f32[100, 8]
return a=%r0_0, b=%r0_1, c=%r1_0, d=%r1_1, e=%region_r2, f=%r3_0, g=%r3_1
"""
_TABLE = 100 * 16


@pytest.mark.parametrize(
    ("region", "tokens", "moved"),
    [
        # A lookup reads 16 rows of the table, but the sum reads all of it: indices, table, and both results.
        ("region_r0", 16, 16 + _TABLE + 16 * 16 + _TABLE),
        # Both calls read the same 16 rows of the table. q and k are read and written.
        ("region_r1", 16, 2 * 16 * (8 + 4) * 16 + 16 + 16 * 16),
        # Positions that repeat read no more than the table.
        ("region_r1", 200, 2 * 200 * (8 + 4) * 16 + 200 + _TABLE),
        # One row is read of the sum, which is made inside the region: both addends are read whole.
        ("region_r2", 64, 2 * 64 * 8 + 1 + 8),
        # What is read of a view is not known: the table counts whole.
        ("region_r3", 16, 16 + _TABLE + 16 * 16 + 100 * 8),
    ],
)
def test_a_region_counts_each_input_as_the_call_that_reads_most(region: str, tokens: int, moved: int) -> None:
    program = parse_program(SHARED)
    costs = {node.name: call_cost(node, program, {"T": tokens, "L": 1}) for node in program.calls()}
    assert costs[region].bytes == 4 * moved
