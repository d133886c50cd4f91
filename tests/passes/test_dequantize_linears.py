"""dequantize-linears: steps of many tokens multiply by matrices that are made of quantized weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from quantized_files import LIMIT_OPTIONS
from staged import LIMITS, pass_context, staged, traced
from tiny import TINY

from ingot.backends.cublas.emit import Cublas
from ingot.backends.reference.emit import Reference
from ingot.backends.triton.emit import Triton
from ingot.compile.buckets import bucket_classes
from ingot.compile.request import Request
from ingot.frontend.checkpoint import Checkpoint
from ingot.ir import build, ops
from ingot.ir.artifact.record import Numerics, PassRecord
from ingot.ir.formats import PARTS, Format, find_format, format_of, named, quantize
from ingot.ir.formats import dequantize as matrix_of
from ingot.ir.formats.activations import Activations
from ingot.ir.formats.format import Scales
from ingot.ir.interpret import interpret
from ingot.ir.machine.target import Target
from ingot.ir.numerics.contracts import breach, measure
from ingot.ir.numerics.harness import rank_params
from ingot.ir.numerics.tolerances import compare
from ingot.ir.program import Program, Stage
from ingot.ir.types import Dim, TensorType
from ingot.passes.dequantize_linears import DequantizeLinears
from ingot.passes.manager import Lowered, run_pass, run_pipeline
from ingot.passes.pipeline import edit_pipeline
from ingot.passes.rewrite import Rewriter

GPU = Target.named("sm_90")
KERNELS = (Triton(), Cublas(), Reference())
MOST = 512  # tokens of a step
ROUNDED = named(Format("", "i8", (Scales(),), Activations("i8")))
ORDERED = format_of("u4", (Scales(1, 32, zeros=True, dtype=torch.float16),), packing="low_first", ordered=True)


def program_of(format: Format, dtype: torch.dtype, rows: str = "T", bias: bool = True) -> Program:
    """A program of one quantized linear [24, 64], whose parts are inputs."""
    program = Program("main", Stage.FUSED, {rows: Dim(rows, 1, 64)})
    types = {"x": TensorType(dtype, (rows, 64)), **format.types((24, 64), torch.float32)}
    if bias:
        types["bias"] = TensorType(dtype, (24,))
    values = {name: program.add_input(name, value_type) for name, value_type in types.items()}
    args = [values.get(name) for name in ("x", *PARTS[:3], "bias", *PARTS[3:])]
    result = build.call(program, ops.quant_linear.overload, args, {"format": format.name})
    program.set_outputs({"y": result})
    return program


def forced(program: Program) -> tuple[Program, PassRecord]:
    return run_pass(DequantizeLinears(force=True), program.copy(), pass_context(), under=Stage.FUSED)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["int4_g32_asym", "int8", "nvfp4", "f8e4m3/1x*:f32"])
def test_results_are_those_of_the_weight_rounded_once(name: str, dtype: torch.dtype) -> None:
    format = find_format(name)
    before = program_of(format, dtype)
    after, record = forced(before)
    assert record.matches == 1 and record.numerics is Numerics.ROUNDING and not record.refusals
    assert record.op_count_diff == {"ingot.quant_linear": -1, "ingot.linear": 1, "ingot.dequantize": 1}
    g = torch.Generator().manual_seed(len(name))
    parts = quantize(torch.randn(24, 64, generator=g) / 8, format)
    given = {"x": torch.randn(7, 64, generator=g).to(dtype), **parts, "bias": torch.randn(24, generator=g).to(dtype)}
    matrix = matrix_of(parts, format, torch.float64).to(dtype)
    expected = F.linear(given["x"].double(), matrix.double(), given["bias"].double()).to(dtype)
    found = interpret(after, given)["y"]
    assert (problem := compare(found, expected, dtype)) is None, problem
    wrong = interpret(after, {**given, "scales": (parts["scales"].float() * 2).to(parts["scales"].dtype)})["y"]
    assert compare(wrong, expected, dtype) is not None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_it_keeps_its_contract(dtype: str, tmp_path: Path) -> None:
    """For prompts of several tokens, of a model with quantized linears."""
    folder = TINY["llama-plain"].write(tmp_path / "m")
    model = Request.read(folder, **LIMIT_OPTIONS, dtype=dtype).trace()
    steps, _ = staged(model, edit_pipeline("default,quantize{format=int8}"))
    before = next(step.program for step in steps if step.name == "choose-layouts")
    after, record = forced(before)
    assert record.matches == len([*before.calls(ops.quant_linear.overload)]) > 0
    read, requests = Checkpoint.open(folder).read, [[1, 5, 9, 2, 8, 30, 41], [7], [3, 3, 17, 25, 11, 12, 13, 14]]
    measured = [measure(one, rank_params(one, read), requests, chunk=None, seed=3).logits for one in (before, after)]
    problem = breach(Numerics.ROUNDING, *measured, getattr(torch, dtype))
    assert problem is None, problem.text


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (program_of(find_format("int8"), torch.float32), "x is f32, and not of 16 bits"),
        (program_of(ROUNDED, torch.bfloat16), f"format {ROUNDED.name} is plain, or rounds or rotates the input of"),
        (program_of(ORDERED, torch.bfloat16), f"format {ORDERED.name} has columns in another order"),
        (program_of(find_format("int8"), torch.bfloat16, "L"), "x has L rows, which may be few"),
    ],
    ids=["32 bits", "rounded activations", "ordered", "rows with logits"],
)
def test_what_stays_has_a_reason(program: Program, reason: str) -> None:
    _, record = forced(program)
    assert record.matches == 0 and len(record.refusals) == 1
    assert record.refusals[0].reason.startswith(reason)


def lowered(format: str, *, most: int = MOST, deterministic: bool = False, backends: Any = KERNELS) -> Lowered:
    classes = bucket_classes(GPU, backends, most, LIMITS.max_batch, deterministic=deterministic)
    context = pass_context(target=GPU, backends=backends, deterministic=deterministic, bucket=None)
    model = traced({**TINY["llama-plain"].config, "dtype": "bfloat16"})
    pipeline = edit_pipeline(f'default,quantize{{format="{format}"}}')
    return run_pipeline(model, context, (classes[0], classes[-1]), pipeline, upto=Stage.LOWERED)


def rewritten(found: Lowered) -> set[str]:
    return {record.bucket or "" for record in found.records if record.name == DequantizeLinears.name and record.matches}


def test_a_gpu_multiplies_by_matrices_in_steps_of_many_tokens() -> None:
    found = lowered("int8")
    assert rewritten(found) == {"extend"}
    calls = [*found.programs["extend"].calls(ops.dequantize.overload)]
    assert calls and {node.meta["backend"] for node in calls} == {"triton"}
    assert not [*found.programs["decode-1"].calls(ops.dequantize.overload)]


def test_other_steps_keep_their_quantized_linears() -> None:
    """Those of fewer tokens, in deterministic mode, without a kernel, and with rounded activations."""
    assert not rewritten(lowered("int8", most=64))
    assert not rewritten(lowered("int8", deterministic=True, backends=(Triton(), Reference())))
    assert not rewritten(lowered("int8", backends=(Cublas(), Reference())))
    assert not rewritten(lowered("int8_w8a8"))
    missing = lowered("i8/1x*:f32:offsets")
    assert not rewritten(missing)
    records = [record for record in missing.records if record.name == DequantizeLinears.name]
    reasons = {one.reason for record in records for one in record.refusals}
    wanted = "no backend has a kernel for dequantize: triton: format i8/1x*:f32:offsets: no kernel for offsets"
    assert wanted in {reason.partition("; ")[0] for reason in reasons}


def test_fuel() -> None:
    program = program_of(find_format("int8"), torch.bfloat16)
    rewriter = Rewriter(program, fuel=0)
    DequantizeLinears(force=True).run(rewriter, pass_context())
    assert not rewriter.rewrites() and [*program.calls(ops.quant_linear.overload)]
    assert not [*program.calls(ops.dequantize.overload)]
