"""The experts of few tokens in MXFP4, by the kernels that load operands of tensor cores (`quant_fragments.py`)."""

from pathlib import Path

import pytest
import torch
from drawn import in_one_of
from quant_experts_calls import call, check
from sm_90 import run_without_interpreter
from triton_schedules import DEVICE, new_schedule, some

from ingot.backends.triton.lower.call import Call, Refused
from ingot.backends.triton.lower.experts.experts import lower_experts
from ingot.backends.triton.lower.experts.fragments import reads_fragments
from ingot.backends.triton.lower.experts.problem import ExpertsProblem
from ingot.backends.triton.lower.experts.tiles import GroupTiles
from ingot.backends.triton.schedule import Value
from ingot.backends.triton.tune.device import Machine
from ingot.backends.triton.tune.experts import Mixture, candidates, make_schedule, tokens_of
from ingot.ir.formats import find_format
from ingot.ir.formats.stacked import stack_types
from ingot.ir.ops.expert_weights import part_parameter
from ingot.ir.types import TensorType

MXFP4 = ("mxfp4", "mxfp4")
BF16 = torch.bfloat16
MIXTURE = Mixture(64, 64, 32, 4, formats=MXFP4)


# Widths of one group of 32 columns up to several turns of the loop, and of rows that no tile divides. Expert 0 has
# several blocks where there are few experts.
@pytest.mark.parametrize(
    ("rows", "experts", "top_k", "hidden", "ffn"),
    some(2, [(3, 2, 1, 864, 32), (9, 2, 2, 96, 96), (5, 3, 1, 32, 288), (3, 4, 2, 160, 64), (17, 1, 1, 128, 32)]),
)
@pytest.mark.parametrize("block", [8, 16])
def test_blocks(rows: int, experts: int, top_k: int, hidden: int, ffn: int, block: int) -> None:
    made = call(MXFP4, rows, BF16, experts=experts, top_k=top_k, hidden=hidden, ffn=ffn, biases=rows % 2 == 1)
    check(*made, block=block)


@pytest.mark.parametrize("activation", some(1, ["gelu", "clamped"]))
@pytest.mark.parametrize("rows", [11])
def test_a_class_takes_small_blocks(rows: int, activation: str) -> None:
    """Without a block that is asked for, as a compile does."""
    options = {"activation": activation, "limit": 0.4, "alpha": 1.5}
    check(*call(MXFP4, rows, BF16, experts=4, top_k=1, hidden=64, ffn=32, biases=True, **options))


# Other kernels compute bf16 wrongly in the interpreter, but for x that is rounded to f8e4m3.
@pytest.mark.parametrize(
    "formats",
    [("fp8", "mxfp4"), *([] if DEVICE == "cpu" else [("mxfp4", "fp8"), ("plain", "mxfp4"), ("mxfp4", "int8")])],
)
def test_one_weight_in_another_format(formats: tuple[str, str]) -> None:
    check(*call(formats, 5, BF16, experts=3, hidden=64, ffn=64, biases=True), block=16)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_stay_in_their_row(bad: float) -> None:
    args, kwargs = call(MXFP4, 4, BF16, experts=2, top_k=1, hidden=160, ffn=32)
    args[0][1, 150] = bad
    check(args, kwargs, block=8)


@pytest.mark.parametrize(
    ("tokens", "blocks"), [(1, {1}), (2, {1, 8}), (16, {1, 8}), (32, {8}), (64, {16}), (65, {16, 32, 64})]
)
def test_steps_and_their_blocks(tokens: int, blocks: set[int]) -> None:
    schedule, _ = make_schedule(Machine(90, 132, dependent=False), MIXTURE, tokens)
    assert {choice.problem["block"] for choice in schedule.choices} == blocks
    names = {launch.kernel.__name__ for launch in schedule.launches if launch.constants.get("TOKENS") in (8, 16)}
    assert names == ({"quant_experts_up_fragments", "quant_experts_down_fragments"} if blocks & {8, 16} else set())


@pytest.mark.parametrize(
    ("packing", "dtype", "sm", "block"),
    [
        ("mxfp4", torch.float16, 90, 8),
        ("mxfp4", torch.float32, 90, 8),
        ("mxfp4", BF16, 80, 8),
        ("mxfp4", BF16, 90, 1),
        ("mxfp4", BF16, 90, 32),
        ("nvfp4", BF16, 90, 8),
        ("int4_g32", BF16, 90, 8),
        ("plain", BF16, 90, 8),
        ("f4e2m1/1x64:f8e8m0/low_first", BF16, 90, 8),
    ],
)
def test_what_they_do_not_support(packing: str, dtype: torch.dtype, sm: int, block: int) -> None:
    assert reads_fragments("mxfp4", BF16, 90, 8)
    assert not reads_fragments(packing, dtype, sm, block)


def test_blocks_of_eight_are_refused_for_other_formats() -> None:
    types = {
        "x": TensorType(BF16, ("T", 64)),
        "weights": TensorType(torch.float32, ("T", 2)),
        "chosen": TensorType(torch.int32, ("T", 2)),
        **{
            part_parameter(name, part): one
            for name in ("gate_up", "down")
            for part, one in stack_types((4, 128 if name == "gate_up" else 64, 64), find_format("int8"), BF16).items()
        },
    }
    values: dict[str, Value | None] = {name: Value(one, input=place) for place, (name, one) in enumerate(types.items())}
    options = {**MIXTURE.options, "gate_up_format": "int8", "down_format": "int8"}
    with pytest.raises(Refused, match="no kernel for blocks of 8"):
        lower_experts(Call("experts", values, options, (types["x"],)), new_schedule(), 8)


def test_tiles_of_an_older_log_are_made_to_fit() -> None:
    """A log may have tile sizes that were for another kernel."""
    problems = [ExpertsProblem(32, 4, 64, 64, gated, 16, "bf16", "mxfp4") for gated in (True, False)]
    for warps, expected in ((2, [(2, 1), (2, 1)]), (16, [(8, 1), (4, 2)])):
        given = {problem: GroupTiles(128, 64, warps=warps, stages=5) for problem in problems}
        schedule, _ = make_schedule(Machine(90, 132, dependent=False), MIXTURE, 64, given)
        found = [one for one in schedule.launches if "TILES" in one.constants]
        assert [(one.constants["TILES"], one.constants["WAYS"]) for one in found] == expected
        assert all(32 * one.warps * one.registers <= 65536 for one in found)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("block", "steps", "count"), [(8, (3, 32), 9), (16, (33, 96), 8)])
def test_tuning(block: int, steps: tuple[int, int], count: int, gated: bool) -> None:
    """Tuning times steps that have these blocks, with tiles that the kernels support."""
    problem = ExpertsProblem(32, 4, 64, 64, gated, block, "bf16", "mxfp4")
    assert steps[0] <= tokens_of(problem, 90) <= steps[1]
    machine, name = Machine(90, 132, dependent=False), "up" if gated else "down"
    found = candidates(problem, machine)
    assert len(found) == count
    for tiles in found:
        schedule, _ = make_schedule(machine, MIXTURE, steps[1] // 2, {problem: tiles})
        (launch,) = (one for one in schedule.launches if one.kernel.__name__.endswith(f"{name}_fragments"))
        assert launch.constants["TILES"] * launch.constants["WAYS"] == launch.warps


SCRIPT = """
import json
import re

import torch

from ingot.backends.triton.tune import device
from ingot.backends.triton.tune.device import Machine, compile_launches
from ingot.backends.triton.tune.experts import Mixture, make_schedule

device.DEVICE = "cpu"
mixture = Mixture(2880, 2880, 32, 4, formats=("mxfp4", "mxfp4"))
found = {}
for tokens, which in ((32, "up"), (64, "down")):
    schedule, _ = make_schedule(Machine(90, 132), mixture, tokens)
    schedule.launches = [one for one in schedule.launches if one.kernel.__name__.endswith(f"{which}_fragments")]
    for launch, made in zip(schedule.launches, compile_launches(schedule, {"T": tokens}), strict=True):
        text = made.asm["ptx"]
        loops = []
        for branch in re.finditer(r"@%p[0-9]+ bra\\s+(\\$L__BB[0-9_]+);", text):
            begin = text.find(branch[1] + ":")
            if 0 <= begin < branch.start():
                loops.append(text[begin : branch.start()])
        (loop,) = (one for one in loops if "mma.sync" in one)
        names = ("mma.sync", ".v4.b32", ".shared", "bar.sync", "shfl")
        found[f"{launch.kernel.__name__} {tokens}"] = [loop.count(name) for name in names]
print(json.dumps(found))
"""


@in_one_of(3)
def test_lanes_keep_what_they_load(tmp_path: Path) -> None:
    """In the loop, no value moves between threads: the layouts of tensors are those of the instruction.

    An iteration has three steps. Each has four loads of words, and for each eight tokens four loads of x and 16
    instructions.
    """
    (tmp_path / "loops.py").write_text(SCRIPT)
    found = run_without_interpreter(tmp_path / "loops.py")
    assert found == {
        "quant_experts_up_fragments 32": [48, 12 + 12, 0, 0, 0],
        "quant_experts_down_fragments 64": [2 * 48, 12 + 2 * 12, 0, 0, 0],
    }
