"""Regions around a product with a quantized weight: norms before it, gates, activations and residuals after it."""

import itertools

import pytest
import torch
from call_oracle import rounded_worse
from triton_schedules import DEVICE, TESTED, run_schedule, some

from ingot.backends.triton.lower.regions import groups, lower_region
from ingot.backends.triton.schedule import Schedule
from ingot.ir.formats import find_format, quantize
from ingot.ir.interpret import interpret
from ingot.ir.parse import parse_program
from ingot.ir.program import Program
from ingot.ir.types import DTYPE_NAMES

N, K = 72, 256
PARTS = {"weight": "w", "scales": "s", "zeros": "z"}
NORM = "%rms_norm = ingot.rms_norm(%x, %gain, eps=1e-05) : {dtype}[T, {K}]\n"
SLICES = (
    "%slice_1 = aten.slice.Tensor(%linear, 1, 0, {N}) : {dtype}[T, {N}; {N2}, 1]\n"
    "%slice_2 = aten.slice.Tensor(%linear, 1, {N}, {N2}) : {dtype}[T, {N}; {N2}, 1]\n"
    "%y = ingot.silu_mul(%slice_1, %slice_2) : {dtype}[T, {N}]\n"
)
ADD = "%y = aten.add.Tensor(%linear, %r) : {dtype}[T, {N}]\n"
RELU = '%y = ingot.activate(%linear, kind="relu") : {dtype}[T, {N}]\n'
# What comes before the product, what comes after it, and whether the weight has two parts.
FORMS = {
    "norm": (NORM, "", False),
    "norm and gate": (NORM, SLICES, True),
    "residual": ("", ADD, False),
    "norm and activation": (NORM, RELU, False),
}
FORMATS = ("int8", "fp8", "fp8_block128", "int4_g128", "int4_g128_asym", "int8_w8a8")
CLASSES = {1: (1, 1), 13: (2, 16), 40: (33, 64), 70: (65, 512)}


def _program(form: str, format: str, dtype: torch.dtype, rows: int) -> Program:
    before, after, gated = FORMS[form]
    width = 2 * N if gated else N
    types = find_format(format).types((width, K), dtype)
    arguments = ", ".join(f"%{PARTS[part]}" for part in types)
    low, high = CLASSES[rows]
    text = f"program main stage=FUSED bucket=few tokens=[{low}, {high}] q_max=any\ndim T in [1, {high}]\n"
    text += "input x: {dtype}[T, {K}]\n"
    text += "input gain: {dtype}[{K}]\n" if before else ""
    text += "".join(f"input {PARTS[part]}: {given}\n" for part, given in types.items())
    text += "input r: {dtype}[T, {N}]\n" if after is ADD else ""
    text += before + f"%linear = ingot.quant_linear({'%rms_norm' if before else '%x'}, {arguments}, "
    text += f'format="{format}") : {{dtype}}[T, {width}]\n' + after
    for name, value in {"dtype": DTYPE_NAMES[dtype], "N": N, "N2": 2 * N, "K": K}.items():
        text = text.replace("{" + name + "}", str(value))
    return parse_program(text + f"return y=%{'y' if after else 'linear'}\n")


@pytest.mark.parametrize("dtype", TESTED, ids=str)
@pytest.mark.parametrize(("form", "format", "rows"), some(6, itertools.product(FORMS, FORMATS, CLASSES)))
def test_regions(form: str, format: str, rows: int, dtype: torch.dtype) -> None:
    program = _program(form, format, dtype, rows)
    assert program.bucket is not None
    assert len(groups(list(program.calls()))) == 1
    g = torch.Generator().manual_seed(rows)
    values = {
        name: torch.randn(given.bind({"T": rows}), generator=g).to(given.dtype)
        for name, given in program.input_types().items()
        if name in ("x", "gain", "r")
    }
    width = 2 * N if FORMS[form][2] else N
    stored = quantize(torch.randn(width, K, generator=g) * K**-0.5, find_format(format))
    values |= {PARTS[part]: tensor for part, tensor in stored.items()}
    schedule = Schedule(sm=90, cores=132, bucket=program.bucket)
    outputs = lower_region(program, schedule)
    inputs = [values[str(node.target)].to(DEVICE) for node in program.placeholders()]
    (found,) = run_schedule(schedule, outputs, inputs, {"T": rows})
    reference = interpret(program, values)["y"]
    wide = {name: tensor.double() if name in ("x", "gain", "r") else tensor for name, tensor in values.items()}
    exact = interpret(program, wide, exact=True)["y"]
    assert (problem := rounded_worse(found.cpu(), reference, exact)) is None, problem
