"""merge-linears: linears of one value become one, or stay apart for a reason that is kept."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ingot.ir import ops
from ingot.ir.artifact.record import Numerics, PassRecord, Refusal
from ingot.ir.interpret import interpret, interpret_ranks
from ingot.ir.mesh import ranks
from ingot.ir.parse import parse_program
from ingot.ir.program import Program
from ingot.ir.types import Placement, Split
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
        ({"(%x, %b,": "(%x, %a,"}, "param 'a' has other uses: 2 in all"),
        ({"%b, %b.bias": "%b, %a.bias"}, "param 'a.bias' has other uses: 2 in all"),
        ({"param b: f32": "param b: bf16"}, "the weights have several dtypes: a f32, b bf16"),
        ({"param b.bias: f32": "param b.bias: bf16"}, "the biases have several dtypes: a.bias f32, b.bias bf16"),
        (
            {"param b: f32[4, 4]": "param b: f32[4, 4] tp=split(0)"},
            "the weights have no common placement along axis 0: a whole, b tp=split(0)",
        ),
        (
            {"param b.bias: f32[4]": "param b.bias: f32[4] tp=split(0)"},
            "the biases have no common placement along axis 0: a.bias whole, b.bias tp=split(0)",
        ),
        # Parts of rows: concatenating them along axis 0 keeps each whole, and then no rank has its part of both.
        (
            {
                "param a: f32[4, 4]": "param a: f32[4, 4] tp=split(1)",
                "param b: f32[4, 4]": "param b: f32[4, 4] tp=split(1)",
            },
            "the weights have no common placement along axis 0: a tp=split(1), b tp=split(1)",
        ),
        ({'param b: f32[4, 4] = source(name="b")': "input b: f32[4, 4]"}, "%b is not a param but the input 'b'"),
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


def test_a_merged_split_asks_for_all_that_its_parts_ask_for(apply: Apply) -> None:
    """Each part is split by itself, in units that are whole ones of all, repeated only where each part may be."""
    text = PAIR.replace("param a: f32[4, 4]", "param a: f32[4, 4] tp=split(0, unit=2, repeat)")
    text = text.replace("param b: f32[4, 4]", "param b: f32[4, 4] tp=split(0, optional)")
    program, _ = apply(MergeLinears(), text)
    assert program.params["a_b"].split == Split("tp", 0, (4, 4), 2) and not program.params["a_b"].placement


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


# --- on a mesh -------------------------------------------------------------------------------------------------------

ON_MESH = """program main stage=CACHED
mesh tp=2
dim T in [1, 8]
input x: f32[T, 4]
param a: f32[4, 4] tp=shard(0) = shard(source(name="a"), axis="tp", dim=0, segments=[])
param b: f32[2, 4] tp=shard(0) = shard(source(name="b"), axis="tp", dim=0, segments=[])
%linear = ingot.linear(%x, %a) : f32[T, 4] tp=shard(1)
%linear_1 = ingot.linear(%x, %b) : f32[T, 2] tp=shard(1)
%all_gather = ingot.all_gather(%linear, axis="tp", dim=1, parts=2) : f32[T, 8]
%all_gather_1 = ingot.all_gather(%linear_1, axis="tp", dim=1, parts=2) : f32[T, 4]
return a=%all_gather, b=%all_gather_1
"""


def test_parts_of_ranks_merge(apply: Apply) -> None:
    """One tensor whose segments are the whole params, split each by itself; a rank's slices are its parts of each."""
    program, record = apply(MergeLinears(), ON_MESH)
    spec = program.params["a_b"]
    assert record.matches == 1 and spec.type.shape == (6, 4)
    assert spec.placement == (Placement("tp", "shard", 0, (8, 4)),)
    assert str(spec.recipe) == (
        'shard(concat(source(name="a"), source(name="b"), dim=0), axis="tp", dim=0, segments=[8, 4])'
    )
    product, *slices = [node for node in program.calls() if node.target != ops.all_gather.overload]
    assert product.meta["placement"] == (Placement("tp", "shard", 1, (8, 4)),)
    assert [node.args[2:] for node in slices] == [(0, 4), (4, 6)]
    assert all(node.meta["placement"] == (Placement("tp", "shard", 1),) for node in slices)
    stored = {"a": torch.randn(8, 4), "b": torch.randn(4, 4)}
    x = torch.randn(3, 4)
    parts = [{"x": x, "a_b": spec.recipe.for_rank(rank).execute(stored.__getitem__)} for rank in ranks(program.mesh)]
    for outputs in interpret_ranks(program, parts):
        torch.testing.assert_close(outputs["a"], x @ stored["a"].T)
        torch.testing.assert_close(outputs["b"], x @ stored["b"].T)


_B = 'param b: f32[2, 4] tp=shard(0) = shard(source(name="b"), axis="tp", dim=0, segments=[])'
_GATHERED = '%all_gather_1 = ingot.all_gather(%linear_1, axis="tp", dim=1, parts=2) : f32[T, 4]\n'
WHOLE = {
    _B: 'param b: f32[2, 4] = source(name="b")',
    " : f32[T, 2] tp=shard(1)": " : f32[T, 2]",
    _GATHERED: "",
    "b=%all_gather_1": "b=%linear_1",
}
MERGED = {  # its segments are not those of a plain shard
    _B: _B.replace("shard(0)", "shard(0, segments=[2, 2])").replace("[])", "[2, 2])"),
    " : f32[T, 2] tp=shard(1)": " : f32[T, 2] tp=shard(1, segments=[2, 2])",
    _GATHERED: "%slice_1 = aten.slice.Tensor(%linear_1, 1, 0, 1) : f32[T, 1; 2, 1] tp=shard(1)\n"
    + _GATHERED.replace("%linear_1", "%slice_1").replace("f32[T, 4]", "f32[T, 2]"),
}


@pytest.mark.parametrize(
    ("changes", "lies"),
    [(WHOLE, "whole"), (MERGED, "tp=shard(0, segments=[2, 2])")],
    ids=["whole on every rank", "merged before"],
)
def test_linears_that_lie_otherwise_stay_apart(apply: Apply, changes: dict[str, str], lies: str) -> None:
    text = ON_MESH
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    _, record = apply(MergeLinears(), text)
    assert record.matches == 0 and record.op_count_diff == {}
    assert record.refusals == (
        Refusal("linear", f"the weights have no common placement along axis 0: a tp=shard(0), b {lies}"),
    )
