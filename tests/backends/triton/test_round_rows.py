"""round_rows by its Triton kernel, alone and fused with a gate, against the ops' references."""

import operator
from typing import Any

import pytest
import torch
from triton_schedules import DEVICE, run_lowering, run_schedule, some

from ingot.backends.triton.lower.quant.round_rows import LOWERINGS
from ingot.backends.triton.lower.refused import Refused
from ingot.backends.triton.lower.regions import groups, lower_region
from ingot.backends.triton.schedule import Schedule
from ingot.ir import build, ops
from ingot.ir.artifact.plan import BucketClass
from ingot.ir.formats import Activations, Scales, format_of
from ingot.ir.interpret import interpret
from ingot.ir.program import Program, Stage
from ingot.ir.types import Dim, TensorType

DTYPES = (torch.float16, torch.float32) if DEVICE == "cpu" else (torch.bfloat16, torch.float16, torch.float32)
STATIC = "f8e4m3/*x*:f32/x=f8e4m3:static"
BOUND = format_of("f8e4m3", (Scales(),), Activations("f8e4m3", bound=1.5)).name
FORMATS = ("fp8", "int8_w8a8", "fp8_block128", STATIC, BOUND)


def check(format: str, tokens: int, columns: int, dtype: torch.dtype, strided: bool = False) -> None:
    g = torch.Generator().manual_seed(tokens + columns)
    x = (torch.randn(tokens, 2 * columns if strided else columns, generator=g) * 3).to(dtype)
    x[tokens // 2] = 0  # a row without a scale
    x = x[:, columns:] if strided else x
    args: list[Any] = [x, *([torch.full((1,), 1 / 37)] if format == STATIC else [])]
    found = run_lowering(ops.round_rows, LOWERINGS["round_rows"], args, {"format": format}, tokens=(65, 512))
    expected = ops.round_rows.reference(*args, format=format)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype is other.dtype and torch.equal(one.cpu().float(), other.float()), format


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS)
def test_formats(format: str, dtype: torch.dtype) -> None:
    check(format, 7, 1280, dtype)


@pytest.mark.parametrize(
    ("format", "tokens", "columns"),
    some(3, [("fp8", 1, 37), ("fp8", 3, 2049), (STATIC, 2, 1031), ("fp8_block128", 1, 128)]),
)
def test_odd_shapes_and_strides(format: str, tokens: int, columns: int) -> None:
    check(format, tokens, columns, DTYPES[0], strided=True)


def test_what_has_no_kernel_is_refused() -> None:
    with pytest.raises(Refused, match="a norm or scale over 40000 elements, more than 32768"):
        check("fp8", 1, 40000, DTYPES[0])


def gate_program(format: str, gate: str, width: int) -> Program:
    """A gate of two column ranges of a matrix, and the rounding of its result."""
    program = Program("main", Stage.LOWERED, {"T": Dim("T", 1, 512)}, bucket=BucketClass(name="many", tokens=(65, 512)))
    half = TensorType(torch.float32, ("T", width), (2 * width, 1))
    halves = [program.add_input(name, half) for name in ("gate", "up")]
    attributes = {"approximate": "tanh"} if gate == "gelu_mul" else {}
    gated = build.call(program, getattr(ops, gate).overload, halves, attributes)
    rounded = build.call(program, ops.round_rows.overload, [gated], {"format": format})
    parts = [build.call(program, operator.getitem, [rounded, place]) for place in (0, 1)]
    program.set_outputs(dict(zip(("elements", "scales"), parts, strict=True)))
    return program


@pytest.mark.parametrize(("format", "gate", "width"), [("fp8", "silu_mul", 200), ("fp8_block128", "gelu_mul", 384)])
def test_the_gate_before_it_is_fused(format: str, gate: str, width: int) -> None:
    program = gate_program(format, gate, width)
    assert program.bucket is not None and groups(list(program.calls())) == [list(program.calls())]
    schedule = Schedule(sm=90, cores=132, bucket=program.bucket)
    outputs = lower_region(program, schedule)
    assert len(schedule.launches) == 1
    x = torch.randn(7, 2 * width, generator=torch.Generator().manual_seed(width)).to(DEVICE)
    found = run_schedule(schedule, outputs, [x[:, :width], x[:, width:]], {"T": 7})
    elements, scales = (one.cpu() for one in found)
    expected = interpret(program, {"gate": x.cpu()[:, :width], "up": x.cpu()[:, width:]})
    assert torch.allclose(scales, expected["scales"], rtol=1e-6)
    # The kernel's activation and torch's differ in the last bit, which turns a few elements to a neighbour.
    assert (elements.float() != expected["elements"].float()).float().mean() < 0.01
