"""The op against torch in float64, what is promised of every op, and the pass that uses it."""

import pytest
import torch
from my_op.fuse_swiglu import FuseSwiGLU
from my_op.swiglu import swiglu

from ingot.ir.interpret import interpret
from ingot.ir.machine.target import Target
from ingot.ir.numerics.tolerances import TOLERANCES, compare
from ingot.ir.parse import parse_program
from ingot.ir.program import Stage
from ingot.passes.base import PassContext
from ingot.passes.manager import run_pass

DTYPES = tuple(TOLERANCES)
BEFORE = """\
program main stage=FUSED
dim T in [1, 8]
input x: f32[T, 6]
input weight: f32[20, 6]
%linear = ingot.linear(%x, %weight) : f32[T, 20]
%gate = aten.slice.Tensor(%linear, 1, 0, 10) : f32[T, 10; 20, 1]
%up = aten.slice.Tensor(%linear, 1, 10, 20) : f32[T, 10; 20, 1]
%silu_mul = ingot.silu_mul(%gate, %up) : f32[T, 10]
return out=%silu_mul
"""
AFTER = """\
program main stage=FUSED
dim T in [1, 8]
input x: f32[T, 6]
input weight: f32[20, 6]
%swiglu = ingot.swiglu(%x, %weight) : f32[T, 10]
return out=%swiglu
"""


def samples(dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [sample.args for sample in swiglu.samples(torch.Generator().manual_seed(0), dtype)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_reference_is_torchs(dtype: torch.dtype) -> None:
    """An independent computation in float64: two separate matmuls."""
    for x, weight in samples(dtype):
        gate, up = weight.double().split(weight.shape[0] // 2)
        wanted = torch.sigmoid(x.double() @ gate.T) * (x.double() @ gate.T) * (x.double() @ up.T)
        problem = compare(swiglu.reference(x, weight), wanted, dtype)
        assert problem is None, problem


@pytest.mark.parametrize("dtype", DTYPES)
def test_promises_of_every_op(dtype: torch.dtype) -> None:
    for x, weight in samples(dtype):
        found = swiglu(x, weight)
        fake = swiglu.overload(x.to("meta"), weight.to("meta"))
        assert (fake.shape, fake.dtype, fake.stride()) == (found.shape, found.dtype, found.stride())
        # Row by row, a row's bits do not depend on its batch.
        assert torch.equal(swiglu.rowwise(x, weight)[-1:], swiglu.rowwise(x[-1:], weight))
        assert compare(swiglu.rowwise(x, weight), found, dtype) is None
        exact = swiglu.decompose(x.double(), weight.double())
        assert compare(swiglu.reference(x.double(), weight.double()), exact, torch.float64) is None


def test_cost() -> None:
    x, weight = torch.empty(5, 24), torch.empty(64, 24)
    assert swiglu.cost(x, weight).flops == 2 * 5 * 24 * 64
    assert swiglu.cost(x, weight).bytes == 4 * (5 * 24 + 64 * 24 + 5 * 32)


def test_the_pass_puts_it_in() -> None:
    context = PassContext(Target.detect("cpu"), max_seq_len=8, max_batch=8, max_tokens=8)
    before = parse_program(BEFORE)
    after, record = run_pass(FuseSwiGLU(), before, context, under=Stage.FUSED)
    assert (record.matches, record.ir_after) == (1, AFTER)
    generator = torch.Generator().manual_seed(1)
    given = {"x": torch.randn(3, 6, generator=generator), "weight": torch.randn(20, 6, generator=generator)}
    assert compare(interpret(after, given)["out"], interpret(before, given, exact=True)["out"], torch.float32) is None


def test_unequal_parts_are_refused() -> None:
    other = BEFORE.replace("input weight: f32[20, 6]", "input weight: f32[24, 6]").replace("f32[T, 20]", "f32[T, 24]")
    other = other.replace("; 20, 1]", "; 24, 1]")
    context = PassContext(Target.detect("cpu"), max_seq_len=8, max_batch=8, max_tokens=8)
    _, record = run_pass(FuseSwiGLU(), parse_program(other), context, under=Stage.FUSED)
    assert record.matches == 0 and "halves" in record.refusals[0].reason
