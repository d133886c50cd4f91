"""merge-linears: linears of one value become one, or stay apart for a reason that is kept."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ingot.ir.interpret import interpret
from ingot.ir.parse import parse_program
from ingot.ir.program import Program
from ingot.ir.record import Numerics, PassRecord, Refusal
from ingot.ir.types import Placement
from ingot.passes.merge_linears import MergeLinears

Apply = Callable[..., tuple[Program, PassRecord]]


def test_golden(golden: Callable[..., PassRecord]) -> None:
    record = golden(MergeLinears())
    assert record.matches == 2 and record.refusals == () and record.numerics is Numerics.ROUNDING


def test_the_parts_are_the_old_results(apply: Apply) -> None:
    """The merged program of the golden computes what the separate linears did; its recipes make the merged weights."""
    text = (Path(__file__).parent / "goldens" / "merge-linears.before.ir").read_text(encoding="utf-8")
    before, (after, _) = parse_program(text), apply(MergeLinears(), text)
    generator = torch.Generator().manual_seed(0)
    stored = {
        str(next(iter(spec.recipe.sources()))): torch.randn(spec.type.bind({}), generator=generator)
        for spec in before.params.values()
    }
    x = torch.randn(5, 4, generator=generator)
    values = [
        interpret(program, {"x": x, **{name: spec.recipe.execute(stored.__getitem__) for name, spec in params}})
        for program, params in ((before, before.params.items()), (after, after.params.items()))
    ]
    for name in ("heads", "k", "y"):
        torch.testing.assert_close(values[1][name], values[0][name])


# Two linears of %x, ready for a change that keeps them apart.
PAIR = """program main stage=CACHED
dim T in [1, 8]
input x: f32[T, 4]
param a: f32[4, 4] = source(name="a")
param b: f32[4, 4] = source(name="b")
param a.bias: f32[4] = source(name="a.bias")
param b.bias: f32[4] = source(name="b.bias")
%linear = ingot.linear(%x, %a, %a.bias) : f32[T, 4]
%linear_1 = ingot.linear(%x, %b, %b.bias) : f32[T, 4]
%add = aten.add.Tensor(%linear, %linear_1) : f32[T, 4]
return y=%add
"""


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"(%x, %b,": "(%x, %a,"}, "param 'a' is used elsewhere too"),
        ({"%b, %b.bias": "%b, %a.bias"}, "param 'a.bias' is used elsewhere too"),
        ({"param b: f32": "param b: bf16"}, "the weights have several dtypes"),
        ({"param b.bias: f32": "param b.bias: bf16"}, "the biases have several dtypes"),
        ({"param b: f32[4, 4]": "param b: f32[4, 4] tp=shard(0)"}, "the weights have no common placement along axis 0"),
        (
            {"param b.bias: f32[4]": "param b.bias: f32[4] tp=replicated"},
            "the biases have no common placement along axis 0",
        ),
        # Parts of rows: concatenating them along axis 0 keeps each whole, and then no rank has its part of both.
        (
            {
                "param a: f32[4, 4]": "param a: f32[4, 4] tp=shard(1)",
                "param b: f32[4, 4]": "param b: f32[4, 4] tp=shard(1)",
            },
            "the weights have no common placement along axis 0",
        ),
        ({'param b: f32[4, 4] = source(name="b")': "input b: f32[4, 4]"}, "%b is no param"),
    ],
)
def test_refusals(apply: Apply, changes: dict[str, str], reason: str) -> None:
    text = PAIR
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    _, record = apply(MergeLinears(), text)
    assert record.matches == 0 and record.refusals == (Refusal("linear", reason),)
    assert record.op_count_diff == {}


def test_the_pair_merges_unchanged(apply: Apply) -> None:
    program, record = apply(MergeLinears(), PAIR)
    assert record.matches == 1 and list(program.params) == ["a_b", "a_b.bias"]


def test_placement_keeps_each_part_by_itself(apply: Apply) -> None:
    text = PAIR.replace("param a: f32[4, 4]", "param a: f32[4, 4] tp=shard(0) dp=replicated")
    text = text.replace("param b: f32[4, 4]", "param b: f32[4, 4] tp=shard(0) dp=replicated")
    program, _ = apply(MergeLinears(), text)
    assert program.params["a_b"].placement == (Placement("tp", "shard", 0, (4, 4)), Placement("dp", "replicated"))


def test_a_chain_of_merges(apply: Apply) -> None:
    """The second pair reads a result of the first, which by then is a slice of the merged product."""
    text = """program main stage=CACHED
dim T in [1, 8]
input x: f32[T, 4]
param a: f32[4, 4] = source(name="a")
param b: f32[4, 4] = source(name="b")
param c: f32[4, 4] = source(name="c")
param d: f32[4, 4] = source(name="d")
%linear = ingot.linear(%x, %a) : f32[T, 4]
%linear_1 = ingot.linear(%x, %b) : f32[T, 4]
%linear_2 = ingot.linear(%linear, %c) : f32[T, 4]
%linear_3 = ingot.linear(%linear, %d) : f32[T, 4]
return b=%linear_1, c=%linear_2, d=%linear_3
"""
    program, record = apply(MergeLinears(), text)
    assert record.matches == 2 and list(program.params) == ["a_b", "c_d"]
    assert record.op_count_diff == {"aten.slice.Tensor": 4, "ingot.linear": -2}


def test_types_follow_through_views(apply: Apply) -> None:
    """A slice has the strides of the merged product, and a view of a view of it too."""
    text = PAIR.replace(
        "%add = aten.add.Tensor(%linear, %linear_1) : f32[T, 4]",
        """%view = aten.view.default(%linear, [-1, 2, 2]) : f32[T, 2, 2]
%slice_1 = aten.slice.Tensor(%view, 1, 0, 1) : f32[T, 1, 2; 4, 2, 1]
%add = aten.add.Tensor(%linear, %linear_1) : f32[T, 4]""",
    ).replace("return y=%add", "return y=%add, s=%slice_1")
    program, _ = apply(MergeLinears(), text)
    assert str(program.output_nodes()["s"].meta["type"]) == "f32[T, 1, 2; 8, 2, 1]"
    assert str(program.output_nodes()["y"].meta["type"]) == "f32[T, 4]"
