"""fuse-add-rms-norm: the residual add and the norm behind it become one op, where nothing else is meant."""

from collections.abc import Callable

import pytest

from ingot.ir.artifact.record import Numerics, PassRecord, Refusal
from ingot.ir.program import Program
from ingot.passes.fuse_add_rms_norm import FuseAddRMSNorm

Apply = Callable[..., tuple[Program, PassRecord]]


def test_golden(golden: Callable[..., PassRecord]) -> None:
    record = golden(FuseAddRMSNorm())
    assert record.matches == 2 and record.refusals == () and record.numerics is Numerics.EXACT


HEADER = """program main stage=CACHED
dim T in [1, 8]
input h: f32[T, 8]
input heads: f32[T, 4, 8]
input row: f32[8]
input narrow: bf16[T, 8]
param w: f32[8] = source(name="w")
"""


@pytest.mark.parametrize(
    ("calls", "reason"),
    [
        (
            "%add = aten.add.Tensor(%h, %row) : f32[T, 8]\n"
            "%rms_norm = ingot.rms_norm(%add, %w, eps=1e-05) : f32[T, 8]\n",
            "the add makes f32[T, 8] of f32[T, 8] and f32[8]",
        ),
        (
            "%add = aten.add.Tensor(%h, %narrow) : f32[T, 8]\n"
            "%rms_norm = ingot.rms_norm(%add, %w, eps=1e-05) : f32[T, 8]\n",
            "the add makes f32[T, 8] of f32[T, 8] and bf16[T, 8]",
        ),
        (
            "%add = aten.add.Tensor(%h, 1.0) : f32[T, 8]\n"
            "%rms_norm = ingot.rms_norm(%add, %w, eps=1e-05) : f32[T, 8]\n",
            "the add makes f32[T, 8] of f32[T, 8] and the constant 1.0",
        ),
        (
            "%add = aten.add.Tensor(%heads, %heads) : f32[T, 4, 8]\n"
            "%rms_norm = ingot.rms_norm(%add, %w, eps=1e-05) : f32[T, 4, 8]\n",
            "the sum is f32[T, 4, 8], not [T, D]",
        ),
        (
            "%add = aten.add.Tensor(%h, %h) : f32[T, 8]\n"
            "%mul = aten.mul.Tensor(%w, %row) : f32[8]\n"
            "%rms_norm = ingot.rms_norm(%add, %mul, eps=1e-05) : f32[T, 8]\n",
            "the weight is the result of aten.mul.Tensor, perhaps computed after the add",
        ),
        (
            "%add = aten.add.Tensor(%h, %h, alpha=2) : f32[T, 8]\n"
            "%rms_norm = ingot.rms_norm(%add, %w, eps=1e-05) : f32[T, 8]\n",
            "the add has the arguments {'alpha': 2}",
        ),
        (
            "%mul = aten.mul.Tensor(%h, %h) : f32[T, 8]\n%rms_norm = ingot.rms_norm(%mul, %w, eps=1e-05) : f32[T, 8]\n",
            "the norm reads the result of aten.mul.Tensor, not a sum",
        ),
        (
            "%rms_norm = ingot.rms_norm(%h, %w, eps=1e-05) : f32[T, 8]\n",
            "the norm reads the input 'h', not a sum",
        ),
    ],
    ids=["broadcast", "promotion", "constant", "heads", "weight", "alpha", "product", "input"],
)
def test_refusals(apply: Apply, calls: str, reason: str) -> None:
    _, record = apply(FuseAddRMSNorm(), HEADER + calls + "return y=%rms_norm\n")
    assert record.matches == 0 and record.refusals == (Refusal("rms_norm", reason),) and record.op_count_diff == {}


def test_norms_of_heads_are_not_even_refused(apply: Apply) -> None:
    text = HEADER + "%rms_norm = ingot.rms_norm(%heads, %w, eps=1e-05) : f32[T, 4, 8]\nreturn y=%rms_norm\n"
    _, record = apply(FuseAddRMSNorm(), text)
    assert record.matches == 0 and record.refusals == ()


def test_two_norms_of_one_sum(apply: Apply) -> None:
    """The first norm takes the add with it; the second one reads the sum that is left."""
    text = (
        HEADER
        + 'param v: f32[8] = source(name="v")\n'
        + "%add = aten.add.Tensor(%h, %h) : f32[T, 8]\n"
        + "%rms_norm = ingot.rms_norm(%add, %w, eps=1e-05) : f32[T, 8]\n"
        + "%rms_norm_1 = ingot.rms_norm(%add, %v, eps=1e-05) : f32[T, 8]\n"
        + "return y=%rms_norm, z=%rms_norm_1, s=%add\n"
    )
    program, record = apply(FuseAddRMSNorm(), text)
    assert record.matches == 1
    assert str(program.output_nodes()["z"].args[0]) == "item_1"
