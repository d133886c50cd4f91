"""Regions around a product: which calls make one, and that their kernels compute what the calls say."""

import itertools

import pytest
import torch
from call_oracle import rounded_worse
from torch import fx
from triton_schedules import DEVICE, TESTED, run_schedule, some

from ingot.backends.triton.lower.call import Refused
from ingot.backends.triton.lower.regions import groups, lower_region
from ingot.backends.triton.schedule import Schedule
from ingot.ir.interpret import interpret
from ingot.ir.parse import parse_program
from ingot.ir.program import Program
from ingot.ir.types import DTYPE_NAMES

N, K = 70, 136
INPUTS = {
    "x": "{dtype}[T, {K}]",
    "gain": "{dtype}[{K}]",
    "wide_gain": "f32[{K}]",
    "w": "{dtype}[{N}, {K}]",
    "b": "{dtype}[{N}]",
    "gate_up": "{dtype}[{N2}, {K}]",
    "gate_up_b": "{dtype}[{N2}]",
    "r": "{dtype}[T, {N}]",
}
NORM = "%rms_norm = ingot.rms_norm(%x, %gain, eps=1e-05) : {dtype}[T, {K}]\n"
WIDE_NORM = NORM.replace("gain", "wide_gain")
PRODUCT = "%linear = ingot.linear({x}, %w) : {{dtype}}[T, {{N}}]\n"
BIASED = "%linear = ingot.linear({x}, %w, %b) : {{dtype}}[T, {{N}}]\n"
BOTH = "%linear = ingot.linear({x}, %gate_up) : {{dtype}}[T, {{N2}}]\n"
BOTH_BIASED = "%linear = ingot.linear({x}, %gate_up, %gate_up_b) : {{dtype}}[T, {{N2}}]\n"
SLICES = (
    "%slice_1 = aten.slice.Tensor(%linear, 1, 0, {N}) : {dtype}[T, {N}; {N2}, 1]\n"
    "%slice_2 = aten.slice.Tensor(%linear, 1, {N}, {N2}) : {dtype}[T, {N}; {N2}, 1]\n"
)
SILU = "%y = ingot.silu_mul(%slice_1, %slice_2) : {dtype}[T, {N}]\n"
SWAPPED = "%y = ingot.silu_mul(%slice_2, %slice_1) : {dtype}[T, {N}]\n"
GELU = '%y = ingot.gelu_mul(%slice_1, %slice_2, approximate="{kind}") : {{dtype}}[T, {{N}}]\n'
ACTIVATE = '%y = ingot.activate(%linear, kind="{kind}") : {{dtype}}[T, {{N}}]\n'
ADD = "%y = aten.add.Tensor({sides}) : {{dtype}}[T, {{N}}]\n"
CAST = "%y = ingot.cast(%linear, dtype=f32) : f32[T, {N}]\n"

FORMS = {
    "norm": NORM + PRODUCT.format(x="%rms_norm"),
    "wide norm": WIDE_NORM + BIASED.format(x="%rms_norm"),
    "norm, cast": NORM + PRODUCT.format(x="%rms_norm") + CAST,
    "cast": PRODUCT.format(x="%x") + CAST,
    "residual left": PRODUCT.format(x="%x") + ADD.format(sides="%r, %linear"),
    "residual right": BIASED.format(x="%x") + ADD.format(sides="%linear, %r"),
    "norm, silu": NORM + BOTH.format(x="%rms_norm") + SLICES + SILU,
    "norm, silu, parts the other way": NORM + BOTH_BIASED.format(x="%rms_norm") + SLICES + SWAPPED,
    **{
        f"plain {kind}": BIASED.format(x="%x") + ACTIVATE.format(kind=kind)
        for kind in ("gelu", "gelu_tanh", "relu", "relu_squared")
    },
    "norm, plain relu": NORM + PRODUCT.format(x="%rms_norm") + ACTIVATE.format(kind="relu"),
    "gelu": BOTH_BIASED.format(x="%x") + SLICES + GELU.format(kind="none"),
    "wide norm, gelu by tanh": WIDE_NORM + BOTH.format(x="%rms_norm") + SLICES + GELU.format(kind="tanh"),
}
BUCKETS = {1: (1, 1), 2: (2, 16), 13: (2, 16), 31: (17, 32), 64: (33, 64)}


def _program(calls: str, dtype: torch.dtype, tokens: tuple[int, int], result: str | None = None) -> Program:
    """A program of these calls, which gives the last of their results."""
    result = result or "y=%" + ("y" if "%y" in calls else "linear")
    used = {name: given for name, given in INPUTS.items() if f"%{name}," in calls or f"%{name})" in calls}
    text = f"program main stage=FUSED bucket=few tokens=[{tokens[0]}, {tokens[1]}] q_max=any\ndim T in [1, 64]\n"
    text += "".join(f"input {name}: {given}\n" for name, given in used.items()) + calls
    filled = {"dtype": DTYPE_NAMES[dtype], "N": N, "N2": 2 * N, "K": K}
    for name, value in filled.items():
        text = text.replace("{" + name + "}", str(value))
    return parse_program(text + f"return {result}\n")


def _values(program: Program, rows: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    values = {}
    for name, given in program.input_types().items():
        size = given.bind({"T": rows})
        values[name] = (
            torch.randn(size, generator=generator)
            * (K**-0.5 if size[-1] == K and len(size) == 2 and name != "x" else 1)
        ).to(given.dtype)
    return values


def _names(found: list[list[fx.Node]]) -> list[list[str]]:
    return [[node.name for node in members] for members in found]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", TESTED)
@pytest.mark.parametrize(("form", "rows"), some(16, itertools.product(FORMS, BUCKETS)))
def test_forms(form: str, rows: int, dtype: torch.dtype) -> None:
    program = _program(FORMS[form], dtype, BUCKETS[rows])
    assert program.bucket is not None
    assert groups(list(program.calls())) == [list(program.calls())]
    values = _values(program, rows)
    schedule = Schedule(sm=90, cores=132, bucket=program.bucket)
    (result,) = outputs = lower_region(program, schedule)
    assert result.type == program.output_nodes()["y"].meta["type"]
    found = run_schedule(schedule, outputs, [value.to(DEVICE) for value in values.values()], {"T": rows})
    # The reference rounds the product before the residual, the gate or the cast, and the kernel need not.
    reference, exact = interpret(program, values)["y"], interpret(program, values, exact=True)["y"]
    assert found[0].dtype == reference.dtype
    assert (problem := rounded_worse(found[0].cpu(), reference, exact)) is None, problem


def _found(calls: str, result: str, taken: set[str] | None = None) -> list[list[str]]:
    program = _program(calls, torch.float32, (1, 1), result)
    return _names(groups([node for node in program.calls() if taken is None or node.name in taken]))


def test_a_value_that_is_read_outside_ends_a_region() -> None:
    norm, product = NORM, PRODUCT.format(x="%rms_norm")
    assert _found(norm + product, "a=%linear, b=%rms_norm") == []
    add = ADD.format(sides="%linear, %r")
    assert _found(norm + product + add, "a=%linear, b=%y") == [["rms_norm", "linear"]]
    both = BOTH.format(x="%rms_norm")
    assert _found(norm + both + SLICES + SILU, "a=%slice_2, b=%y") == [["rms_norm", "linear"]]
    assert _found(norm + both + SLICES + SILU, "a=%linear, b=%y") == [["rms_norm", "linear"]]


def test_what_is_no_chain_is_left_out() -> None:
    product = PRODUCT.format(x="%x")
    assert _found(product, "y=%linear") == []
    assert _found(product + ADD.format(sides="%linear, %linear"), "y=%y") == []
    assert _found(product + ADD.format(sides="%linear, %b"), "y=%y") == []  # broadcast over the rows
    assert _found(product + ADD.format(sides="%linear, 1"), "y=%y") == []
    assert _found(product + CAST.replace("f32", "bf16"), "y=%y") == []
    half = SLICES.replace("%slice_2 = aten.slice.Tensor(%linear, 1, {N}", "%slice_2 = aten.slice.Tensor(%linear, 0, 0")
    assert (
        "1, 0, {N}" in half
        and _found(BOTH.format(x="%x") + SLICES + SILU.replace("%slice_2", "%slice_1"), "y=%y, z=%slice_2") == []
    )


def test_calls_that_another_backend_takes_stay_with_it() -> None:
    calls = NORM + BOTH.format(x="%rms_norm") + SLICES + SILU
    assert _found(calls, "y=%y", {"linear", "y"}) == [["linear", "slice_1", "slice_2", "y"]]
    assert _found(calls, "y=%y", {"rms_norm", "linear"}) == [["rms_norm", "linear"]]
    assert _found(calls, "y=%y", {"rms_norm", "y"}) == []


def test_two_products_share_no_call() -> None:
    """A sum of two products goes to one of them; the other is its residual."""
    calls = PRODUCT.format(x="%x") + "%linear_1 = ingot.linear(%x, %w, %b) : {dtype}[T, {N}]\n"
    assert _found(calls + ADD.format(sides="%linear, %linear_1"), "y=%y") == [["linear", "y"]]


@pytest.mark.parametrize(
    ("calls", "result", "reason"),
    [
        (NORM, "y=%rms_norm", "0 matmuls"),
        (NORM + PRODUCT.format(x="%x"), "y=%linear, z=%rms_norm", "2 calls, where only 1"),
        (NORM + PRODUCT.format(x="%rms_norm"), "y=%linear, z=%rms_norm", "2 calls, where only 1"),
    ],
)
def test_other_programs_are_refused(calls: str, result: str, reason: str) -> None:
    program = _program(calls, torch.float32, (1, 1), result)
    assert program.bucket is not None
    with pytest.raises(Refused, match=reason):
        lower_region(program, Schedule(sm=90, cores=132, bucket=program.bucket))
