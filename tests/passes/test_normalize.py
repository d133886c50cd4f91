"""normalize: equal calls become one, views that change nothing go, unused calls and params go."""

from collections.abc import Callable

from ingot.ir.program import Program
from ingot.ir.record import Numerics, PassRecord
from ingot.passes.normalize import Normalize

Apply = Callable[..., tuple[Program, PassRecord]]


def test_golden(golden: Callable[..., PassRecord]) -> None:
    record = golden(Normalize())
    assert record.matches == 3  # one view, one norm, one product
    assert record.numerics is Numerics.EXACT
    assert record.op_count_diff == {
        "aten.add.Tensor": -1,  # unused
        "aten.mul.Tensor": -1,
        "aten.view.default": -1,
        "ingot.rms_norm": -1,
    }


def test_nothing_to_do(apply: Apply) -> None:
    text = """program main stage=TRACED
dim T in [1, 8]
input x: f32[T, 8]
%mul = aten.mul.Tensor(%x, %x) : f32[T, 8]
%mul_1 = aten.mul.Tensor(%x, 1) : f32[T, 8]
%mul_2 = aten.mul.Tensor(%x, True) : f32[T, 8]
return a=%mul, b=%mul_1, c=%mul_2
"""
    program, record = apply(Normalize(), text)
    assert record.matches == 0 and record.op_count_diff == {} and record.ir_after == text
    assert [record.ir_after for record in [apply(Normalize(), record.ir_after)[1]]] == [text]
    assert len(list(program.calls())) == 3


def test_an_output_is_replaced_too(apply: Apply) -> None:
    text = """program main stage=TRACED
dim T in [1, 8]
input x: f32[T, 8]
%mul = aten.mul.Tensor(%x, 3) : f32[T, 8]
%mul_1 = aten.mul.Tensor(%x, 3) : f32[T, 8]
return a=%mul, b=%mul_1
"""
    assert apply(Normalize(), text)[1].ir_after.splitlines()[-1] == "return a=%mul, b=%mul"
