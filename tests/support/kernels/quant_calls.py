"""Products with quantized weights by Triton kernels, alone and in regions, compared with references."""

from dataclasses import replace
from typing import Any

import torch
from call_oracle import rounded_worse
from triton_schedules import DEVICE, run_lowering, run_schedule

from ingot.backends.triton.lower.linear.matmul import LOWERINGS
from ingot.backends.triton.lower.regions import groups, lower_region
from ingot.backends.triton.schedule import Schedule
from ingot.ir import ops
from ingot.ir.formats import PARTS, Format, find_format, named, quantize
from ingot.ir.interpret import interpret
from ingot.ir.numerics.tolerances import compare
from ingot.ir.parse import parse_program
from ingot.ir.program import Program
from ingot.ir.types import DTYPE_NAMES

BUCKETS = ((1, 1), (2, 16), (17, 32), (33, 64), (65, 512))
N, K = 72, 256
NAMES = {"weight": "w", "scales": "s", "zeros": "z"}
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
CLASSES = {1: (1, 1), 13: (2, 16), 40: (33, 64), 70: (65, 512)}


def drawn(
    format: Format, rows: int, n: int, k: int, dtype: torch.dtype
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """x [rows, k], and the parts of a weight [n, k] in `format`."""
    generator = torch.Generator().manual_seed(rows + n + k)
    x = torch.randn(rows, k, generator=generator).to(dtype)
    static = "input_scale" in format.parts
    bare = named(replace(format, activations=None if static else format.activations, ordered=False))
    parts = quantize(torch.randn(n, k, generator=generator) * k**-0.5, bare)
    if "input_scale" in format.parts:
        parts["input_scale"] = torch.full((1,), 1 / 128)
    if format.ordered:
        parts["order"] = torch.randperm(k, generator=generator).to(torch.int32)
    return x, parts


def check(
    name: str,
    rows: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    bias: bool = False,
    x: torch.Tensor | None = None,
    cores: int = 132,
) -> None:
    format = find_format(name)
    random, parts = drawn(format, rows, n, k, dtype)
    x = random if x is None else x
    weight, scales, zeros, *others = (parts.get(part) for part in PARTS)
    added = torch.linspace(-1, 1, n).to(dtype) if bias else None
    args: list[Any] = [x, weight, scales, zeros, added, *others]
    tokens = next(bounds for bounds in BUCKETS if rows <= bounds[1])
    kwargs = {"format": name}
    dims = {"T": rows}
    lowering = LOWERINGS["quant_linear"]
    (found,) = run_lowering(ops.quant_linear, lowering, args, kwargs, tokens=tokens, dims=dims, cores=cores)
    # In float32, so that activations round as in the op.
    exact = [x.float(), weight, scales, zeros, None if added is None else added.float(), *others]
    expected = ops.quant_linear.reference(*exact, **kwargs)
    assert (problem := compare(found, expected, dtype)) is None, f"{name}: {problem}"


def _program(form: str, format: str, dtype: torch.dtype, rows: int) -> Program:
    before, after, gated = FORMS[form]
    width = 2 * N if gated else N
    types = find_format(format).types((width, K), dtype)
    arguments = ", ".join(f"%{NAMES[part]}" for part in types)
    low, high = CLASSES[rows]
    text = f"program main stage=FUSED bucket=few tokens=[{low}, {high}] q_max=any\ndim T in [1, {high}]\n"
    text += "input x: {dtype}[T, {K}]\n"
    text += "input gain: {dtype}[{K}]\n" if before else ""
    text += "".join(f"input {NAMES[part]}: {given}\n" for part, given in types.items())
    text += "input r: {dtype}[T, {N}]\n" if after is ADD else ""
    text += before + f"%linear = ingot.quant_linear({'%rms_norm' if before else '%x'}, {arguments}, "
    text += f'format="{format}") : {{dtype}}[T, {width}]\n' + after
    for name, value in {"dtype": DTYPE_NAMES[dtype], "N": N, "N2": 2 * N, "K": K}.items():
        text = text.replace("{" + name + "}", str(value))
    return parse_program(text + f"return y=%{'y' if after else 'linear'}\n")


def check_region(form: str, format: str, rows: int, dtype: torch.dtype, cores: int = 132) -> Schedule:
    """Compare the kernels of a region with the interpreter, and return their schedule."""
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
    values |= {NAMES[part]: tensor for part, tensor in stored.items()}
    schedule = Schedule(sm=90, cores=cores, bucket=program.bucket)
    outputs = lower_region(program, schedule)
    inputs = [values[str(node.target)].to(DEVICE) for node in program.placeholders()]
    (found,) = run_schedule(schedule, outputs, inputs, {"T": rows})
    reference = interpret(program, values)["y"]
    wide = {name: tensor.double() if name in ("x", "gain", "r") else tensor for name, tensor in values.items()}
    exact = interpret(program, wide, exact=True)["y"]
    assert (problem := rounded_worse(found.cpu(), reference, exact)) is None, problem
    return schedule
