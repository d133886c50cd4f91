"""separate-rounding: steps of many tokens round activations apart from the matmul."""

import operator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
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
from ingot.ir.formats import PARTS, Activations, Format, Scales, find_format, format_of, named, quantize
from ingot.ir.interpret import interpret
from ingot.ir.machine.target import Target
from ingot.ir.numerics.contracts import breach, measure
from ingot.ir.numerics.harness import rank_params
from ingot.ir.numerics.tolerances import compare
from ingot.ir.program import Program, Stage, tensor_type
from ingot.ir.types import Dim, TensorType
from ingot.passes.manager import Lowered, run_pass, run_pipeline
from ingot.passes.pipeline import edit_pipeline
from ingot.passes.rewrite import Rewriter
from ingot.passes.separate_rounding import SeparateRounding

KERNELS = (Triton(), Cublas(), Reference())
COLUMNS = 256
# Sizes that cuBLAS multiplies in eight bits.
EVEN = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
STATIC = format_of("f8e4m3", (Scales(0, 0),), Activations("f8e4m3", stored=True, dynamic=False))


def program_of(format: Format, rows: str = "T", linears: int = 1) -> Program:
    """A program of quantized linears [24, 256] of one x, whose parts are inputs."""
    program = Program("main", Stage.FUSED, {rows: Dim(rows, 1, 64)})
    types = {"x": TensorType(torch.float32, (rows, COLUMNS)), **format.types((24, COLUMNS), torch.float32)}
    values = {
        name: program.add_input(name, value_type)
        for name, value_type in {**types, "bias": TensorType(torch.float32, (24,))}.items()
    }
    args = [values.get(name) for name in ("x", *PARTS[:3], "bias", *PARTS[3:])]
    results = [build.call(program, ops.quant_linear.overload, args, {"format": format.name}) for _ in range(linears)]
    program.set_outputs({f"y{index}": result for index, result in enumerate(results)})
    return program


def forced(program: Program) -> tuple[Program, PassRecord]:
    return run_pass(SeparateRounding(force=True), program.copy(), pass_context(), under=Stage.FUSED)


@pytest.mark.parametrize(
    "format", [*map(find_format, ("fp8", "fp8_block128", "int8_w8a8")), STATIC], ids=lambda f: f.name
)
def test_both_ops_compute_what_the_matmul_computes(format: Format) -> None:
    before = program_of(format)
    after, record = forced(before)
    assert record.matches == 1 and record.numerics is Numerics.ROUNDING and not record.refusals
    g = torch.Generator().manual_seed(len(format.name))
    parts = quantize(torch.randn(24, COLUMNS, generator=g) / 16, named(replace(format, activations=None)))
    if format.parts[-1] == "input_scale":
        parts["input_scale"] = torch.full((1,), 1 / 64)
    given = {"x": torch.randn(7, COLUMNS, generator=g), **parts, "bias": torch.randn(24, generator=g)}
    expected, found = interpret(before, given)["y0"], interpret(after, given)["y0"]
    assert (problem := compare(found, expected, torch.float32)) is None, problem
    whole = interpret(after, {**given, "x": given["x"] * 1.01})["y0"]
    assert compare(whole, expected, torch.float32) is not None


def test_linears_of_one_x_share_its_rounding() -> None:
    after, record = forced(program_of(find_format("fp8"), linears=2))
    assert record.matches == 2
    assert len([*after.calls(ops.round_rows.overload)]) == 1 and len([*after.calls(ops.rounded_linear.overload)]) == 2


def test_it_keeps_its_contract(tmp_path: Path) -> None:
    """For prompts of several tokens, of a model with quantized linears."""
    folder = TINY["llama-plain"].write(tmp_path / "m")
    model = Request.read(folder, **LIMIT_OPTIONS, dtype="bfloat16").trace()
    steps, _ = staged(model, edit_pipeline("default,quantize{format=fp8_per_channel_per_token}"))
    before = next(step.program for step in steps if step.name == "choose-layouts")
    after, record = forced(before)
    assert record.matches == len([*before.calls(ops.quant_linear.overload)]) > 0
    read, requests = Checkpoint.open(folder).read, [[1, 5, 9, 2, 8, 30, 41], [7], [3, 3, 17, 25, 11, 12, 13, 14]]
    measured = [measure(one, rank_params(one, read), requests, chunk=None, seed=3).logits for one in (before, after)]
    problem = breach(Numerics.ROUNDING, *measured, torch.bfloat16)
    assert problem is None, problem.text


@pytest.mark.parametrize(
    ("format", "rows", "reason"),
    [
        (find_format("int8"), "T", "format int8 does not round activations to elements with scales of their own"),
        (find_format("mxfp8"), "T", "format mxfp8 has more than one float32 scale for a block of elements"),
        (
            format_of("i4", (Scales(1, 32),), Activations("i8"), packing="low_first"),
            "T",
            "format i4/1x32:f32/low_first/x=i8:* has elements i4, and activations i8",
        ),
        (find_format("fp8"), "L", "x has L rows, which may be few in a step of many tokens"),
    ],
    ids=["not rounded", "powers of two", "two elements", "rows with logits"],
)
def test_what_stays_has_a_reason(format: Format, rows: str, reason: str) -> None:
    _, record = forced(program_of(format, rows))
    assert record.matches == 0 and [one.reason for one in record.refusals] == [reason]


def lowered(format: str, dtype: str = "bfloat16", target: str = "sm_90", **options: Any) -> Lowered:
    deterministic = options.pop("deterministic", False)
    backends, gpu = options.pop("backends", KERNELS), Target.named(target)
    classes = bucket_classes(gpu, backends, 512, LIMITS.max_batch, deterministic=deterministic)
    context = pass_context(target=gpu, backends=backends, deterministic=deterministic, bucket=None)
    model = traced({**TINY["llama-plain"].config, **EVEN, "dtype": dtype})
    pipeline = edit_pipeline(f'default,quantize{{format="{format}"}}')
    return run_pipeline(model, context, (classes[0], classes[-1]), pipeline, upto=Stage.LOWERED)


def records(found: Lowered) -> list[PassRecord]:
    return [record for record in found.records if record.name == SeparateRounding.name]


def test_a_gpu_rounds_once_and_multiplies_by_a_library() -> None:
    """The gate of an MLP and the rounding of its result are one region."""
    found = lowered("fp8")
    assert {record.bucket for record in records(found) if record.matches} == {"extend"}
    program = found.programs["extend"]
    products = [*program.calls(ops.rounded_linear.overload)]
    assert products and {node.meta["backend"] for node in products} == {"cublas"}
    bodies = [[node.target for node in region.body.calls()] for region in program.regions.values()]
    both = [ops.silu_mul.overload, ops.round_rows.overload, operator.getitem, operator.getitem]
    assert both in bodies
    kept = [tensor_type(node).shape[0] for node in program.calls(ops.quant_linear.overload)]
    assert set(kept) <= {"L"}
    assert [*found.programs["decode-1"].calls(ops.quant_linear.overload)] or found.programs["decode-1"].regions


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("format", "options", "reason"),
    [
        ("int8_w8a8", {}, "no matmul of i8 elements on this target"),
        ("fp8", {"dtype": "float16"}, "no matmul of f8e4m3 elements with a result of f16"),
        ("fp8", {"target": "sm_80"}, "f8e4m3 needs"),
        ("fp8", {"backends": (Triton(), Reference())}, "triton: no kernel for ingot.rounded_linear"),
        ("f8e4m3/32x32:f32/x=f8e4m3:32", {}, "no matmul with the scales of format"),
    ],
)
def test_without_kernels_the_matmul_stays_and_the_reason_is_recorded(
    format: str, options: dict[str, Any], reason: str
) -> None:
    found = records(lowered(format, **options))
    assert found and not [record for record in found if record.matches]
    assert [one for record in found for one in record.refusals if reason in one.reason]


def test_deterministic_mode_keeps_the_matmul() -> None:
    assert not [
        one for one in records(lowered("fp8", deterministic=True, backends=(Triton(), Reference()))) if one.matches
    ]


def test_fuel() -> None:
    program = program_of(find_format("fp8"))
    rewriter = Rewriter(program, fuel=0)
    SeparateRounding(force=True).run(rewriter, pass_context())
    assert not rewriter.rewrites() and [*program.calls(ops.quant_linear.overload)]
    assert not [*program.calls(ops.round_rows.overload)] and not [*program.calls(operator.getitem)]
