"""Diffs of programs with regions: layers that share a region, and calls in and out of regions."""

import pytest
from edited_diff import edited_diff

from ingot.ir.diff import diff_programs
from ingot.ir.errors import VerifyError
from ingot.ir.parse import parse_program

REGIONS = """\
program main stage=LOWERED bucket=any tokens=[1, 64] q_max=any
dim T in [1, 64]
param n0: f32[16] = source(name="layers.0.norm")
param w0: f32[16, 16] = source(name="layers.0.w")
param n1: f32[16] = source(name="layers.1.norm")
param w1: f32[16, 16] = source(name="layers.1.w")
param n2: f32[16] = source(name="layers.2.norm")
param w2: f32[16, 16] = source(name="layers.2.w")
input x: f32[T, 16]
region r0 @inductor {
  input in0: f32[T, 16]
  input in1: f32[16]
  input in2: f32[16, 16]
  %rms_norm = ingot.rms_norm(%in0, %in1, eps=0.1) : f32[T, 16]  # layer 0, blocks/attention.py:10
  %linear = ingot.linear(%rms_norm, %in2) : f32[T, 16]  # layer 0, blocks/attention.py:11
  return out0=%linear
}
%region_r0 = region.r0(%x, %n0, %w0) : f32[T, 16] @inductor  # layer 0, blocks/attention.py:10 … blocks/attention.py:11
%soft_cap = ingot.soft_cap(%region_r0, cap=5.0) : f32[T, 16] @reference  # layer 0, blocks/attention.py:12
%region_r0_1 = region.r0(%soft_cap, %n1, %w1) : f32[T, 16] @inductor  # layer 1, blocks/attention.py:10
%soft_cap_1 = ingot.soft_cap(%region_r0_1, cap=5.0) : f32[T, 16] @reference  # layer 1, blocks/attention.py:12
%region_r0_2 = region.r0(%soft_cap_1, %n2, %w2) : f32[T, 16] @inductor  # layer 2, blocks/attention.py:10
%soft_cap_2 = ingot.soft_cap(%region_r0_2, cap=5.0) : f32[T, 16] @reference  # layer 2, blocks/attention.py:12
return y=%soft_cap_2
"""
IN_ALL = "in layers 0–2:\n  "


@pytest.mark.parametrize(
    ("edits", "entries", "text"),
    [
        # What layers share is one difference of them all.
        (
            [("eps=0.1", "eps=0.2")],
            1,
            f"{IN_ALL}~ %rms_norm = ingot.rms_norm(...) in region r0: eps 0.1 -> 0.2",
        ),
        (
            [("linear(%rms_norm", "linear(%in0")],
            1,
            f"{IN_ALL}~ %linear = ingot.linear(...) in region r0: x %rms_norm -> %in0",
        ),
        ([("@inductor", "@tensorrt")], 1, f"{IN_ALL}~ region r0: backend inductor -> tensorrt"),
        # What each layer has is folded when it is printed.
        ([("@reference", "@cpu")], 3, f"{IN_ALL}~ %soft_cap = ingot.soft_cap(...): backend reference -> cpu"),
        ([("cap=5.0", "cap=6.0")], 3, f"{IN_ALL}~ %soft_cap = ingot.soft_cap(...): cap 5.0 -> 6.0"),
        (
            [("(%region_r0_1, cap=5.0)", "(%region_r0_1, cap=6.0)")],
            1,
            "~ %soft_cap_1 = ingot.soft_cap(...) layer 1: cap 5.0 -> 6.0",
        ),
        ([("@inductor  # layer 1", "@cpu  # layer 1")], 1, "~ region r0 layer 1: backend of the call inductor -> cpu"),
        # A call outside of its region: the region is another one, and the call has a backend of its own.
        (
            [
                ("  %linear =", "  %unused ="),
                ("out0=%linear", "out0=%rms_norm"),
                ("  %unused = ingot.linear(%rms_norm, %in2) : f32[T, 16]  # layer 0, blocks/attention.py:11\n", ""),
                ("  input in2: f32[16, 16]\n", ""),
                ("(%x, %n0, %w0)", "(%x, %n0)"),
                ("(%soft_cap, %n1, %w1)", "(%soft_cap, %n1)"),
                ("(%soft_cap_1, %n2, %w2)", "(%soft_cap_1, %n2)"),
                (
                    "%soft_cap = ingot.soft_cap(%region_r0,",
                    "%l0 = ingot.linear(%region_r0, %w0) : f32[T, 16] @inductor\n%soft_cap = ingot.soft_cap(%l0,",
                ),
                (
                    "%soft_cap_1 = ingot.soft_cap(%region_r0_1,",
                    "%l1 = ingot.linear(%region_r0_1, %w1) : f32[T, 16] @inductor\n%soft_cap_1 = ingot.soft_cap(%l1,",
                ),
                (
                    "%soft_cap_2 = ingot.soft_cap(%region_r0_2,",
                    "%l2 = ingot.linear(%region_r0_2, %w2) : f32[T, 16] @inductor\n%soft_cap_2 = ingot.soft_cap(%l2,",
                ),
            ],
            1,
            f"{IN_ALL}~ region r0: calls %linear -> –",
        ),
        (
            [("return out0=%linear", "return out0=%rms_norm")],
            4,
            f"{IN_ALL}~ %soft_cap = ingot.soft_cap(...): x %region_r0 (%linear) -> %region_r0 (%rms_norm)\n"
            "  ~ region r0: results %linear -> %rms_norm",
        ),
    ],
)
def test_regions(edits: list[tuple[str, str]], entries: int, text: str) -> None:
    found = edited_diff(REGIONS, *edits)
    assert len(found.changed) == entries and not found.added and not found.removed, f"\n{found}"
    assert str(found) == text or not text, f"\n{found}"


def test_equal_regions_may_be_one_or_two() -> None:
    begin, end = REGIONS.index("region r0"), REGIONS.index("%region_r0 =")
    body = REGIONS[begin:end]
    assert not edited_diff(
        REGIONS, (body, body + body.replace("region r0", "region r1")), ("_2 = region.r0", "_2 = region.r1")
    )


def test_forming_regions_shows_the_regions_and_no_call() -> None:
    text = """\
program main stage=FUSED
dim T in [1, 64]
param n: f32[16] = source(name="n")
input x: f32[T, 16]
%rms_norm = ingot.rms_norm(%x, %n, eps=0.1) : f32[T, 16] @inductor
%soft_cap = ingot.soft_cap(%rms_norm, cap=5.0) : f32[T, 16] @inductor
return y=%soft_cap
"""
    region = """\
region r0 @inductor {
  input in0: f32[T, 16]
  input in1: f32[16]
  %rms_norm = ingot.rms_norm(%in0, %in1, eps=0.1) : f32[T, 16]
  %soft_cap = ingot.soft_cap(%rms_norm, cap=5.0) : f32[T, 16]
  return out0=%soft_cap
}
%region_r0 = region.r0(%x, %n) : f32[T, 16] @inductor
return y=%region_r0
"""
    found = parse_program(text).diff(parse_program(text[: text.index("%rms_norm =")] + region))
    assert str(found) == "+ region r0 @inductor: ingot.rms_norm, ingot.soft_cap"


def test_a_program_whose_regions_cannot_be_opened_is_refused() -> None:
    broken = parse_program(REGIONS.replace("region.r0(%x, %n0, %w0)", "region.r0(%x, %n0)"))
    with pytest.raises(VerifyError, match="region r0 is called with 2 values"):
        broken.diff(parse_program(REGIONS))
    with pytest.raises(VerifyError, match="unknown region 'r9'"):
        diff_programs(parse_program(REGIONS), parse_program(REGIONS.replace("= region.r0(%x", "= region.r9(%x")))
