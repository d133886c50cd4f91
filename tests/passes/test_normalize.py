"""normalize: views that change nothing go, unused calls and params too."""

from collections.abc import Callable

from ingot.ir.artifact.record import Numerics, PassRecord
from ingot.ir.program import Program
from ingot.passes.normalize import Normalize

Apply = Callable[..., tuple[Program, PassRecord]]


def test_golden(golden: Callable[..., PassRecord]) -> None:
    record = golden(Normalize())
    assert record.matches == 3 and record.numerics is Numerics.EXACT
    # One sum is unused. A view of a view that undoes it stays: only the pair of them changes nothing.
    assert record.op_count_diff == {"aten.add.Tensor": -1, "aten.slice.Tensor": -2, "aten.view.default": -1}


def test_nothing_to_do(apply: Apply) -> None:
    text = """program main stage=TRACED
dim T in [1, 8]
input x: f32[T, 8]
%slice_1 = aten.slice.Tensor(%x, 1, 4, 8) : f32[T, 4; 8, 1]
%view = aten.view.default(%x, [-1, 2, 4]) : f32[T, 2, 4]
%mul = aten.mul.Tensor(%slice_1, 1) : f32[T, 4]
return a=%mul, b=%view
"""
    _, record = apply(Normalize(), text)
    assert record.matches == 0 and record.op_count_diff == {} and record.ir_after == text
