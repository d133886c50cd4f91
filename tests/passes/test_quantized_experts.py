"""Experts in quantized formats: what quantize and adopt-quantized make of them, and how a mesh divides them."""

import textwrap
from dataclasses import replace
from typing import Any

import pytest
import torch
from staged import pass_context

from ingot.ir import ops
from ingot.ir.artifact.record import PassRecord
from ingot.ir.errors import IngotError, OptionError
from ingot.ir.formats import find_format
from ingot.ir.formats.stacked import dequantize_stack, quantize_stack
from ingot.ir.interpret import interpret, interpret_ranks
from ingot.ir.mesh import ranks
from ingot.ir.numerics.quantized_weights import weight_breaches, with_rounded_weights
from ingot.ir.numerics.tolerances import compare
from ingot.ir.parse import parse_program
from ingot.ir.program import ParamSpec, Program, Stage, named_arguments
from ingot.ir.recipe import Recipe, cast, concat, dequantize, permute, source, stack, take_slice
from ingot.ir.text import print_program
from ingot.ir.verify import verify
from ingot.passes.adopt_quantized import AdoptQuantized
from ingot.passes.base import Pass
from ingot.passes.manager import run_pass
from ingot.passes.quantize import Quantize
from ingot.passes.select_linears import check_patterns
from ingot.passes.shard import Shard
from ingot.passes.stored_parts import Parts, stacked_parts

EXPERTS, WIDTH, HIDDEN = 3, 64, 128
TEXT = textwrap.dedent("""\
    program main stage=NORMAL
    dim T in [1, 8]
    input x: f32[T, 128]
    input weights: f32[T, 2]
    input chosen: i32[T, 2]
    param mlp.gate_up: f32[3, 128, 128] tp=split(1, segments=[64, 64]) = source(name="gate_up")
    param mlp.down: f32[3, 128, 64] tp=split(2) = source(name="down")
    %experts = ingot.experts(%x, %weights, %chosen, %mlp.gate_up, %mlp.down) : f32[T, 128]
    return y=%experts
""")
DRAWN = torch.Generator().manual_seed(0)
STORED = {
    "gate_up": torch.randn(EXPERTS, 2 * WIDTH, HIDDEN, generator=DRAWN) / 8,
    "down": torch.randn(EXPERTS, HIDDEN, WIDTH, generator=DRAWN) / 8,
}
INPUTS = {
    "x": torch.randn(5, HIDDEN, generator=DRAWN),
    "weights": torch.rand(5, 2, generator=DRAWN),
    "chosen": torch.rand(5, EXPERTS, generator=DRAWN).argsort(-1)[:, :2].int().contiguous(),
}


def passed(one: Pass, program: Program | None = None) -> tuple[Program, PassRecord]:
    return run_pass(one, parse_program(TEXT) if program is None else program, pass_context(), under=Stage.QUANTIZED)


def params(program: Program) -> dict[str, torch.Tensor]:
    return {name: spec.recipe.execute(STORED.__getitem__) for name, spec in program.params.items()}


def formats(program: Program) -> tuple[str, str]:
    (node,) = program.calls(ops.experts.overload)
    bound = named_arguments(node)
    return bound["gate_up_format"], bound["down_format"]


@pytest.mark.parametrize("format", ["int8", "int8_tensor", "int4_g32_asym", "mxfp4", "fp8", "fp8_block128", "nvfp4"])
def test_quantize_loses_the_rounding_of_weights_and_nothing_else(format: str) -> None:
    before, (after, record) = parse_program(TEXT), passed(Quantize(format=format, overrides="none=int8"))
    if format == "fp8_block128":  # rows of down are shorter than a group
        assert formats(after) == (format, "plain") and "rows of 64 elements" in record.refusals[0].reason
    else:
        assert formats(after) == (format, format) and record.refusals == ()
    assert record.matches == 1
    assert print_program(parse_program(print_program(after))) == print_program(after)
    old, new = params(before), params(after)
    assert weight_breaches(before, after, [old], [new]) == []
    rounded, (values,) = with_rounded_weights(before, after, [old], [new])
    expected = interpret(rounded, {**INPUTS, **values}, exact=True)["y"]
    found = interpret(after, {**INPUTS, **new}, exact=True)["y"]
    assert compare(found, expected, torch.float64, factor=100) is None
    assert compare(found, interpret(before, {**INPUTS, **old}, exact=True)["y"], torch.float32) is not None


@pytest.mark.parametrize("format", ["int8", "mxfp4"])
def test_a_wrong_scale_of_one_expert_is_found(format: str) -> None:
    before, (after, _) = parse_program(TEXT), passed(Quantize(format=format))
    new = params(after)
    scales = new["mlp.down.scales"].view(torch.uint8) if format == "mxfp4" else new["mlp.down.scales"]
    scales[2, 5, 0] += 1
    (found,) = weight_breaches(before, after, [params(before)], [new])
    assert found.param == "mlp.down.scales"


def test_patterns() -> None:
    program, _ = passed(Quantize(format="int8", ignore="gate_up", overrides="mlp.down=int4_g32"))
    assert formats(program) == ("plain", "int4_g32")
    check_patterns([parse_program(TEXT)], ["mlp.gate_*", "down"])
    with pytest.raises(OptionError, match="the pattern 'up' matches no linear or experts") as caught:
        check_patterns([parse_program(TEXT)], ["up"])
    assert "mlp.gate_up" in caught.value.expected


def test_a_weight_that_does_not_fit() -> None:
    with pytest.raises(OptionError, match="format 'i4/1x48:f32/low_first' does not fit the weights of experts: rows"):
        passed(Quantize(format="i4/1x48:f32/low_first"))


def passed_on(mesh: dict[str, int], one: Pass, program: Program) -> Program:
    return run_pass(one, program, replace(pass_context(), mesh=mesh), under=Stage.QUANTIZED)[0]


@pytest.mark.parametrize("format", ["int8", "int4_g32", "int8_tensor", "nvfp4"])
def test_a_mesh_divides_experts_by_their_width(format: str) -> None:
    """Whole groups stay on a rank, and the ranks compute together what one device does."""
    alone, _ = passed(Quantize(format=format))
    sharded = run_pass(Shard(), alone, replace(pass_context(), mesh={"tp": 2}), under=Stage.SHARDED)[0]
    assert [place.dim for place in sharded.params["mlp.gate_up.qweight"].placement] == [1]
    assert [place.dim for place in sharded.params["mlp.down.qweight"].placement] == [2]
    values = []
    for rank in ranks({"tp": 2}):
        own = {name: spec.recipe.for_rank(rank) for name, spec in sharded.params.items()}
        values.append({**INPUTS, **{name: one.execute(STORED.__getitem__) for name, one in own.items()}})
    expected = interpret(alone, {**INPUTS, **params(alone)}, exact=True)["y"]
    for found in interpret_ranks(sharded, values, exact=True):
        assert compare(found["y"], expected, torch.float64, factor=100) is None


def test_experts_that_a_mesh_cannot_divide() -> None:
    """A token's scale needs all columns of down, so every rank holds all weights; blocks of rows are not cut."""
    program, _ = passed(Quantize(format="fp8", ignore="gate_up"))
    assert program.params["mlp.gate_up"].split is program.params["mlp.down.qweight"].split is None
    blocks = Quantize(format="f8e4m3/128x32:f32")
    assert passed(blocks)[0].params["mlp.gate_up.qweight"].split is None
    with pytest.raises(OptionError, match="64 of a merged weight are no multiple of 128") as caught:
        passed_on({"tp": 2}, blocks, parse_program(TEXT))
    assert caught.value.where == "param mlp.gate_up"


# Each rule of recipes: stacks of experts, joined gate and up, every second row.
def matrix(name: str, format: str) -> Recipe:
    return dequantize({part: source(f"{name}.{part}") for part in find_format(format).parts}, format)


def each(name: str, format: str) -> Recipe:
    return stack([matrix(f"{name}{index}", format) for index in range(EXPERTS)])


def drawn(names: tuple[str, ...], rows: int, format: str) -> dict[str, torch.Tensor]:
    stored = {}
    for name in names:
        made = quantize_stack(torch.randn(EXPERTS, rows, HIDDEN, generator=DRAWN), find_format(format))
        stored |= {f"{name}{index}.{part}": one[index] for part, one in made.items() for index in range(EXPERTS)}
    return stored


@pytest.mark.parametrize("format", ["int8", "int8_tensor", "mxfp4", "int4_g32_asym", "nvfp4", "f8e4m3/32x32:f32"])
def test_gate_and_up_of_each_expert_are_adopted_as_they_are(format: str) -> None:
    recipe = cast(concat([each("gate", format), each("up", format)], 1), torch.float32)
    stored = drawn(("gate", "up"), WIDTH, format)
    found = stacked_parts(recipe, (EXPERTS, 2 * WIDTH, HIDDEN))
    assert isinstance(found, Parts)
    made = {part: one.execute(stored.__getitem__) for part, one in found.recipes.items()}
    assert torch.equal(dequantize_stack(made, found.format), recipe.execute(stored.__getitem__))
    assert found.format.row_by_row and made["weight"].dtype == stored["gate0.weight"].dtype


@pytest.mark.parametrize("format", ["int8", "mxfp4", "int8_tensor"])
def test_alternating_rows(format: str) -> None:
    """As GPT-OSS stores gate and up."""
    both, stored = each("both", format), drawn(("both",), 2 * WIDTH, format)
    recipe = concat([take_slice(both, 1, begin, begin + 1, every=2) for begin in (0, 1)], 1)
    found = stacked_parts(recipe, (EXPERTS, 2 * WIDTH, HIDDEN))
    assert isinstance(found, Parts)
    made = {part: one.execute(stored.__getitem__) for part, one in found.recipes.items()}
    assert torch.equal(dequantize_stack(made, found.format), recipe.execute(stored.__getitem__))


STATIC = "f8e4m3/1x*:f32/x=f8e4m3:static"


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        (permute(each("a", "int8"), (0, 2, 1)), "computed by 'permute'"),
        (concat([each("a", "int8"), each("b", "mxfp4")], 1), "the weight formats differ: int8, mxfp4"),
        (stack([matrix("a", "int8"), matrix("b", "mxfp4")]), "the weight formats differ: int8, mxfp4"),
        (concat([each("a", "fp8_block128"), each("b", "fp8_block128")], 1), "64 rows of a weight are no multiple of"),
        (concat([each("a", STATIC), each("b", STATIC)], 1), "the joined weights have their own input_scale"),
        (take_slice(each("a", "fp8_block128"), 1, 0, 1, every=2), "128 rows of format 'fp8_block128' stay together"),
    ],
)
def test_what_is_not_adopted(recipe: Recipe, reason: str) -> None:
    program = parse_program(TEXT)
    spec = program.params["mlp.gate_up"]
    program.params["mlp.gate_up"] = ParamSpec(spec.type, recipe, split=spec.split)
    after, record = passed(AdoptQuantized(), program)
    assert formats(after) == ("plain", "plain") and reason in record.refusals[0].reason


def test_only_one_weight_is_quantized() -> None:
    program = parse_program(TEXT)
    spec = program.params["mlp.gate_up"]
    recipe = concat([each("gate", "mxfp4"), each("up", "mxfp4")], 1)
    program.params["mlp.gate_up"] = ParamSpec(spec.type, recipe, split=spec.split)
    after, record = passed(AdoptQuantized(), program)
    assert formats(after) == ("mxfp4", "plain") and record.refusals == () and record.matches == 1
    assert set(after.params) == {"mlp.gate_up.qweight", "mlp.gate_up.scales", "mlp.down"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"gate_up_format": "mxfp4"},
            "expert weights|gate_up.* is",
        ),
        ({"gate_up_format": "plain"}, "gate_up of format plain"),
        ({"gate_up_format": "int5"}, "unknown weight format 'int5'"),
        ({"down_format": "int4_g32_asym"}, "down"),
    ],
)
def test_parts_that_do_not_fit_their_format(changes: dict[str, Any], message: str) -> None:
    program, _ = passed(Quantize(format="int8"))
    text = print_program(program)
    for name, value in changes.items():
        assert f'{name}="int8"' in text
        text = text.replace(f'{name}="int8"', f'{name}="{value}"')
    with pytest.raises(IngotError, match=message):
        verify(parse_program(text))
