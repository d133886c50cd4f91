"""form-regions: calls of a region compiler are cut at what stays outside; equal regions are one."""

import random
from collections.abc import Callable
from operator import getitem

import pytest
import torch
from checked_plan import CheckedPlanRun
from staged import BUCKET, emit_nothing, pass_context

from ingot.ir import build, ops
from ingot.ir.artifact.record import PassRecord
from ingot.ir.interpret import interpret
from ingot.ir.parse import parse_program
from ingot.ir.program import ParamSpec, Program, RegionCall, Stage, op_counts
from ingot.ir.recipe import source
from ingot.ir.text import print_program
from ingot.ir.types import Dim, TensorType
from ingot.ir.verify import verify
from ingot.passes.dce import eliminate_dead_code
from ingot.passes.emit_executables import EmitExecutables
from ingot.passes.form_regions import FormRegions
from ingot.passes.make_plan import MakePlan
from ingot.passes.manager import run_pass

Apply = Callable[..., tuple[Program, PassRecord]]

HEADER = """program main stage=FUSED bucket=any tokens=[1, 8] q_max=any
dim T in [1, 8]
input x: f32[T, 8]
input rows: i32[T]
param w: f32[8] = source(name="w")
param m: f32[8, 8] = source(name="m")
"""


def _calls(program: Program) -> list[str]:
    return [node.target.name for node in program.calls() if isinstance(node.target, RegionCall)]


def _same_results(before: str, after: Program) -> None:
    generator = torch.Generator().manual_seed(1)
    values = {
        "x": torch.randn(3, 8, generator=generator),
        "rows": torch.tensor([2, 0, 1], dtype=torch.int32),
        "w": torch.randn(8, generator=generator),
        "m": torch.randn(8, 8, generator=generator),
    }
    expected, found = interpret(parse_program(before), values), interpret(after, values)
    assert all(torch.equal(found[name], value) for name, value in expected.items()) and found.keys() == expected.keys()


def test_golden(golden: Callable[..., PassRecord]) -> None:
    """Two equal layers share a region, the last norm (over other rows) has its own, a lone view has none."""
    record = golden(FormRegions())
    assert record.matches == 3


def test_a_diamond_around_an_outside_call_is_two_regions(apply: Apply) -> None:
    text = (
        HEADER
        + "%mul = aten.mul.Tensor(%x, %w) : f32[T, 8] @inductor\n"
        + "%select_rows = ingot.select_rows(%mul, %rows) : f32[T, 8] @reference\n"
        + "%add = aten.add.Tensor(%mul, %select_rows) : f32[T, 8] @inductor\n"
        + "return y=%add\n"
    )
    program, record = apply(FormRegions(), text)
    assert record.matches == 2 and _calls(program) == ["r0", "r1"]
    _same_results(text, program)


def test_disconnected_components_are_apart(apply: Apply) -> None:
    text = (
        HEADER
        + "%mul = aten.mul.Tensor(%x, 2) : f32[T, 8] @inductor\n"
        + "%mul_1 = aten.mul.Tensor(%x, 3) : f32[T, 8] @inductor\n"
        + "%add = aten.add.Tensor(%mul, 1) : f32[T, 8] @inductor\n"
        + "%add_1 = aten.add.Tensor(%mul_1, 1) : f32[T, 8] @inductor\n"
        + "return a=%add, b=%add_1\n"
    )
    program, record = apply(FormRegions(), text)
    # Another factor is another region: constants are part of the code.
    assert record.matches == 2 and _calls(program) == ["r0", "r1"]
    assert [len(list(region.body.calls())) for region in program.regions.values()] == [2, 2]
    _same_results(text, program)


def test_regions_are_equal_when_their_code_is(apply: Apply) -> None:
    cut = "%select_rows{n} = ingot.select_rows(%mul{n}, %rows) : f32[T, 8] @reference\n"
    text = HEADER.replace("param m", 'param v: f32[8] = source(name="v")\nparam m')
    text += "%mul = aten.mul.Tensor(%x, %w) : f32[T, 8] @inductor  # layer 0\n" + cut.format(n="")
    text += "%mul_1 = aten.mul.Tensor(%select_rows, %v) : f32[T, 8] @inductor  # layer 1\n" + cut.format(n="_1")
    text += "%mul_2 = aten.mul.Tensor(%v, %select_rows_1) : f32[T, 8] @inductor  # layer 2, another order\n"
    text += cut.format(n="_2")
    text += "%mul_3 = aten.mul.Tensor(%select_rows_2, %select_rows_2) : f32[T, 8] @inductor  # layer 3, one operand\n"
    text += "return y=%mul_3\n"
    program, record = apply(FormRegions(), text)
    assert _calls(program) == ["r0", "r0", "r1", "r2"] and record.matches == 4
    first = next(node for node in program.calls() if isinstance(node.target, RegionCall))
    assert first.meta["origin"] == "layer 0" and first.meta["backend"] == "inductor"


def test_equal_code_of_another_size_is_another_region(apply: Apply) -> None:
    text = (
        HEADER
        + "%mul = aten.mul.Tensor(%x, 2) : f32[T, 8] @inductor\n"
        + "%mul_1 = aten.mul.Tensor(%w, 2) : f32[8] @inductor\n"
        + "return a=%mul, b=%mul_1\n"
    )
    program, _ = apply(FormRegions(), text)
    assert _calls(program) == ["r0", "r1"]
    assert [dict(region.body.dims) for region in program.regions.values()] == [{"T": Dim("T", 1, 8)}, {}]


def test_groups_of_views_stay_outside(apply: Apply) -> None:
    text = (
        HEADER
        + "%select_rows = ingot.select_rows(%x, %rows) : f32[T, 8] @reference\n"
        + "%view = aten.view.default(%select_rows, [-1, 2, 4]) : f32[T, 2, 4] @inductor\n"
        + "%slice_1 = aten.slice.Tensor(%view, 1, 0, 1) : f32[T, 1, 4; 8, 4, 1] @inductor\n"
        + "return y=%slice_1\n"
    )
    program, record = apply(FormRegions(), text)
    assert (
        record.matches == 0
        and not program.regions
        and set(op_counts(program))
        <= {
            "ingot.select_rows",
            "aten.view.default",
            "aten.slice.Tensor",
        }
    )
    assert {node.meta["backend"] for node in program.calls()} == {"reference"}


def test_a_strided_view_is_a_result(apply: Apply) -> None:
    text = (
        HEADER
        + "%linear = ingot.linear(%x, %m) : f32[T, 8] @inductor\n"
        + "%slice_1 = aten.slice.Tensor(%linear, 1, 2, 6) : f32[T, 4; 8, 1] @inductor\n"
        + "%view = aten.view.default(%slice_1, [-1, 2, 2]) : f32[T, 2, 2; 8, 2, 1] @inductor\n"
        + "return y=%view, whole=%linear\n"
    )
    program, record = apply(FormRegions(), text)
    (region,) = program.regions.values()
    assert record.matches == 1
    assert [str(node.meta["type"]) for node in region.body.output_nodes().values()] == [
        "f32[T, 8]",
        "f32[T, 2, 2; 8, 2, 1]",
    ]
    _same_results(text, program)


def test_results_that_are_not_read(apply: Apply) -> None:
    """The second result of a fused norm is dead in a last layer, with or without a getitem that takes it."""
    norm = "%add_rms_norm = ingot.add_rms_norm(%x, %x, %w, eps=1e-05) : (f32[T, 8], f32[T, 8]) @inductor\n"
    for dead in ("", "%item_1 = getitem(%add_rms_norm, 1) : f32[T, 8]\n"):
        text = HEADER + norm + "%item = getitem(%add_rms_norm, 0) : f32[T, 8]\n{dead}return y=%item\n"
        program = parse_program(text.replace("{dead}", dead))
        program, record = run_pass(FormRegions(), program, pass_context(bucket=program.bucket), under=Stage.LOWERED)
        assert record.matches == 1 and _calls(program) == ["r0"]
        assert program.regions["r0"].body.outputs == ("out0",)
        _same_results(text.replace("{dead}", dead), program)


def test_regions_of_a_program_are_kept(apply: Apply) -> None:
    """Formed once more, a program stays as it is, and new calls find the old regions."""
    text = HEADER + "%mul = aten.mul.Tensor(%x, 2) : f32[T, 8] @inductor\nreturn y=%mul\n"
    once, record = apply(FormRegions(), text)
    again = apply(FormRegions(), record.ir_after)[1]
    assert again.matches == 0 and again.ir_after == record.ir_after
    with once.graph.inserting_before(once.graph.output_node()):
        more = build.call(once, torch.ops.aten.mul.Tensor, (once.output_nodes()["y"], 2))
    more.meta["backend"] = "inductor"
    once.set_outputs({"y": more})
    more_record = apply(FormRegions(), print_program(once))
    assert _calls(more_record[0]) == ["r0", "r0"] and list(more_record[0].regions) == ["r0"]


def _random_program(seed: int) -> tuple[Program, dict[str, torch.Tensor]]:
    """Forty calls of all kinds that read each other at random, inside and outside of regions."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    program = Program("main", Stage.FUSED, {"T": Dim("T", 1, 8)}, bucket=BUCKET)
    values = [program.add_input("x", TensorType(torch.float32, ("T", 8)))]
    rows = program.add_input("rows", TensorType(torch.int32, ("T",)))
    weight = program.add_param("w", ParamSpec(TensorType(torch.float32, (8,)), source("w")))
    matrix = program.add_param("m", ParamSpec(TensorType(torch.float32, (16, 8)), source("m")))
    for _ in range(40):
        x, y = draw.choice(values), draw.choice(values[-6:])
        kind = draw.randrange(6)
        backend = "inductor"
        if kind == 0:
            node = build.call(program, ops.select_rows.overload, (x, rows))
            backend = "reference"
        elif kind == 1:
            both = build.call(program, ops.add_rms_norm.overload, (x, y, weight), {"eps": 1e-5})
            both.meta["backend"] = draw.choice(("inductor", "reference"))
            values += [build.call(program, getitem, (both, index)) for index in (0, 1)]
            continue
        elif kind == 2:
            wide = build.call(program, ops.linear.overload, (x, matrix))
            wide.meta["backend"] = draw.choice(("inductor", "reference"))
            node = build.call(program, torch.ops.aten.slice.Tensor, (wide, 1, 4, 12))
        elif kind == 3:
            node = build.call(program, ops.rms_norm.overload, (x, weight), {"eps": 1e-5})
        else:
            node = build.call(program, torch.ops.aten.add.Tensor, (x, y))
            backend = draw.choice(("inductor", "inductor", "reference"))
        node.meta["backend"] = backend
        values.append(node)
    outputs = draw.sample([node for node in values if node.op == "call_function"], 4)
    program.set_outputs({f"out{index}": node for index, node in enumerate(dict.fromkeys([*outputs, values[-1]]))})
    eliminate_dead_code(program)
    given = {
        "x": torch.randn(3, 8, generator=generator),
        "rows": torch.tensor([2, 0, 0], dtype=torch.int32),
        "w": torch.randn(8, generator=generator),
        "m": torch.randn(16, 8, generator=generator),
    }
    return program, {str(node.target): given[str(node.target)] for node in program.placeholders()}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", range(40))
def test_random_programs(seed: int) -> None:
    """Regions never wait for each other, results stay the same bits, and the plan frees what it must and no more."""
    program, values = _random_program(seed)
    verify(program, under=Stage.LOWERED)
    expected = interpret(program, values)
    lowered = program
    for one in (FormRegions(), EmitExecutables()):
        lowered, _ = run_pass(one, lowered, pass_context(emit=emit_nothing), under=Stage.LOWERED)
    found = interpret(lowered, values)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    inductor = [node for node in lowered.calls() if node.meta.get("backend") == "inductor"]
    assert all(isinstance(node.target, RegionCall) for node in inductor)
    assert print_program(parse_program(print_program(lowered))) == print_program(lowered)
    lowered.stage = Stage.LOWERED
    planned, _ = run_pass(MakePlan(), lowered, pass_context(), under=Stage.PLANNED)
    params = {name: values[name] for name in planned.params}
    run = CheckedPlanRun(planned, params)
    results = run({name: values[name] for name in planned.input_types()})
    assert all(torch.equal(results[name], value) for name, value in expected.items())
