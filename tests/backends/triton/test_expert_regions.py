"""Regions of experts and the add of a residual: which calls make one, and that their kernels compute the sum."""

from typing import Any

import pytest
import torch
from experts_oracle import experts_difference
from quant_experts_calls import CLASSES, call
from torch import fx
from triton_schedules import DEVICE, TESTED, run_schedule, some

from ingot.backends.triton.launches import evaluate
from ingot.backends.triton.lower.call import Refused
from ingot.backends.triton.lower.regions import groups, lower_region
from ingot.backends.triton.schedule import Schedule
from ingot.ir import build, ops
from ingot.ir.artifact.plan import BucketClass, owed_features
from ingot.ir.parse import parse_program
from ingot.ir.program import Program, Stage
from ingot.ir.types import Dim, TensorType

BF16 = torch.bfloat16
PLAIN, MXFP4 = ("plain", "plain"), ("mxfp4", "mxfp4")
ALONE, BLOCKS = {"experts_down_rows"}, {"add_choices"}
dtypes = pytest.mark.parametrize("dtype", TESTED, ids=str)


def _region(
    args: list[Any], kwargs: dict[str, Any], residual: torch.Tensor, *, left: bool, invariant: bool
) -> tuple[Program, list[torch.Tensor]]:
    """A program of experts and an add with inputs of these tensors' types, and the tensors.

    The residual is the left term or the right one.
    """
    rows = args[0].shape[0]
    low, high = next(bounds for bounds in CLASSES if rows <= bounds[1])
    program = Program("main", Stage.FUSED, {"T": Dim("T", 1, high)})
    program.bucket = BucketClass(name="test", tokens=(low, high), features=owed_features(deterministic=invariant))
    tensors = [one for one in (*args, residual) if one is not None]
    nodes = {}
    for place, tensor in enumerate(tensors):
        per_row = place < 3 or tensor is residual
        strides = None if tensor.is_contiguous() else tuple(tensor.stride())
        shape = ("T", *tensor.shape[1:]) if per_row else tuple(tensor.shape)
        nodes[id(tensor)] = program.add_input(f"in{place}", TensorType(tensor.dtype, shape, strides))
    given = [None if one is None else nodes[id(one)] for one in args]
    made, added = build.call(program, ops.experts.overload, given, kwargs), nodes[id(residual)]
    total = build.call(program, torch.ops.aten.add.Tensor, (added, made) if left else (made, added))
    program.set_outputs({"y": total})
    return program, tensors


def check(
    args: list[Any], kwargs: dict[str, Any], last: set[str], *, left: bool = False, invariant: bool = False
) -> torch.Tensor:
    """Compare the kernels of a region with the op's reference, and return the sum.

    `last` are the kernels that add the residual. Its rows are apart, with NaN between them.
    """
    rows, hidden = args[0].shape
    wide = torch.full((rows + 1, hidden + 5), float("nan"), dtype=args[0].dtype)
    residual = wide[:rows, :hidden]
    residual.copy_(torch.randn(100, hidden, generator=torch.Generator().manual_seed(hidden))[:rows])
    program, tensors = _region(args, kwargs, residual, left=left, invariant=invariant)
    assert groups(list(program.calls())) == [list(program.calls())]
    assert program.bucket is not None
    schedule = Schedule(sm=90, cores=132, bucket=program.bucket)
    (total,) = outputs = lower_region(program, schedule)
    assert total.type == program.output_nodes()["y"].meta["type"]
    adding = [one for one in schedule.launches if "y" in one.arguments]
    assert all(one.arguments["residual"] is not None for one in adding)
    sizes = {"T": rows}
    assert {one.kernel.__name__ for one in adding if all(evaluate(size, sizes) for size in one.grid)} == last
    inputs = [_moved(one) for one in tensors]
    (found,) = run_schedule(schedule, outputs, inputs, sizes)
    assert (problem := experts_difference(args, kwargs, found.cpu(), residual)) is None, f"{kwargs}: {problem}"
    return found


def _moved(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the device, with its strides: a copy of a slice would have adjacent rows."""
    if DEVICE == "cpu" or tensor.is_contiguous():
        return tensor.to(DEVICE)
    wide = torch.full((tensor.shape[0] + 1, tensor.stride(0)), float("nan"), dtype=tensor.dtype, device=DEVICE)
    return wide[: tensor.shape[0], : tensor.shape[1]].copy_(tensor)


@dtypes
@pytest.mark.parametrize(("rows", "last"), [(1, ALONE), (3, ALONE), (19, BLOCKS), (70, BLOCKS)])
@pytest.mark.parametrize("left", some(1, [False, True]))
def test_plain(left: bool, rows: int, last: set[str], dtype: torch.dtype) -> None:
    """Widths that no tile divides. The class of three rows has launches for blocks as well, which do not run."""
    many = {"experts": 40, "top_k": 3} if rows == 3 else {"experts": 5, "top_k": 2}
    check(*call(PLAIN, rows, dtype, hidden=70, ffn=37, biases=rows % 2 == 1, **many), last, left=left)


@dtypes
@pytest.mark.parametrize(
    ("formats", "rows", "hidden", "ffn", "last"),
    [
        (("plain", "int8"), 1, 21, 16, {"quant_experts_down_rows"}),
        (("plain", "mxfp4"), 2, 18, 32, {"quant_experts_down_rows"}),
        (("int8", "plain"), 1, 16, 20, ALONE),
        (("int8", "int8"), 18, 70, 37, BLOCKS),
        (MXFP4, 33, 96, 64, BLOCKS),
    ],
    ids=str,
)
def test_quantized(
    formats: tuple[str, str], rows: int, hidden: int, ffn: int, last: set[str], dtype: torch.dtype
) -> None:
    check(*call(formats, rows, dtype, hidden=hidden, ffn=ffn, experts=40 if rows == 2 else 9, biases=True), last)


def test_small_blocks() -> None:
    check(*call(MXFP4, 3, BF16, experts=2, top_k=1, hidden=96, ffn=32), BLOCKS)


@dtypes
def test_batch_invariant(dtype: torch.dtype) -> None:
    """A row's bits are the same in steps of all sizes."""
    args, kwargs = call(PLAIN, 4, dtype, hidden=48, ffn=32)
    found = []
    for rows in (1, 4):
        part = [one[:rows] if place < 3 else one for place, one in enumerate(args)]
        found.append(check(part, kwargs, BLOCKS, invariant=True)[:1])
    assert torch.equal(*found)


# --- which calls make a region ----------------------------------------------------------------------------------------

EXPERTS = "%experts = ingot.experts(%x, %weights, %chosen, %gate_up, %down) : bf16[T, 32]\n"
INPUTS = {
    "x": "bf16[T, 32]",
    "weights": "f32[T, 2]",
    "chosen": "i32[T, 2]",
    "gate_up": "bf16[4, 32, 32]",
    "down": "bf16[4, 32, 16]",
    "r": "bf16[T, 32]",
    "wide": "f32[T, 32]",
    "row": "bf16[32]",
    "one": "bf16[1, 32]",
    "strided": "bf16[T, 32; 64, 2]",
    "w": "bf16[32, 32]",
}


def _program(calls: str, result: str, mesh: str = "") -> Program:
    text = f"program main stage=FUSED bucket=few tokens=[1, 1] q_max=any\n{mesh}dim T in [1, 1]\n"
    text += "".join(f"input {name}: {given}\n" for name, given in INPUTS.items())
    return parse_program(f"{text}{calls}return {result}\n")


def _found(calls: str, result: str = "y=%y", left_out: tuple[str, ...] = ()) -> list[list[str]]:
    nodes: list[fx.Node] = [node for node in _program(calls, result).calls() if node.name not in left_out]
    return [[node.name for node in members] for members in groups(nodes)]


def _add(sides: str, dtype: str = "bf16", name: str = "y") -> str:
    return f"%{name} = aten.add.Tensor({sides}) : {dtype}[T, 32]\n"


@pytest.mark.parametrize("sides", ["%experts, %r", "%r, %experts"])
def test_the_add_that_follows_is_fused(sides: str) -> None:
    assert _found(EXPERTS + _add(sides)) == [["experts", "y"]]


@pytest.mark.parametrize(
    ("add", "result"),
    [
        (_add("%experts, %wide", "f32"), "y=%y"),
        (_add("%experts, %row"), "y=%y"),
        (_add("%experts, %one"), "y=%y"),
        (_add("%experts, %strided"), "y=%y"),
        (_add("%experts, %experts"), "y=%y"),
        (_add("%experts, 1"), "y=%y"),
        (_add("%experts, %r, alpha=2"), "y=%y"),
        (_add("%experts, %r"), "y=%y, z=%experts"),
        (_add("%experts, %r") + _add("%experts, %x", name="z"), "y=%y, z=%z"),
        ("%y = aten.mul.Tensor(%experts, %r) : bf16[T, 32]\n", "y=%y"),
        ("", "y=%experts"),
    ],
)
def test_what_is_not_fused(add: str, result: str) -> None:
    """Another dtype, a broadcast, elements of a row apart, twice the same, a scaled term, and another reader."""
    assert _found(EXPERTS + add, result) == []


def test_calls_that_another_backend_takes_stay_with_it() -> None:
    assert _found(EXPERTS + _add("%experts, %r"), left_out=("y",)) == []
    assert _found(EXPERTS + _add("%experts, %r"), left_out=("experts",)) == []


def test_of_two_adds_the_first_is_fused() -> None:
    """As with a shared part whose result is scaled: its sum with the experts, then the residual stream."""
    shared = "%mul = aten.mul.Tensor(%x, %r) : bf16[T, 32]\n"
    adds = _add("%experts, %mul", name="both") + _add("%r, %both")
    assert _found(EXPERTS + shared + adds) == [["experts", "both"]]


def test_a_matmul_is_fused_with_its_sum_with_experts() -> None:
    shared = "%linear = ingot.linear(%x, %w) : bf16[T, 32]\n"
    assert _found(EXPERTS + shared + _add("%experts, %linear")) == [["linear", "y"]]
    assert _found(EXPERTS + shared + _add("%experts, %linear"), left_out=("linear",)) == [["experts", "y"]]


def test_a_sum_over_ranks_comes_before_the_add() -> None:
    total = '%all_reduce = ingot.all_reduce(%experts, axis="tp") : bf16[T, 32]\n'
    program = _program(EXPERTS + total + _add("%r, %all_reduce"), "y=%y", "mesh tp=2\n")
    assert groups([node for node in program.calls() if node.name != "all_reduce"]) == []


@pytest.mark.parametrize(
    ("calls", "result"),
    [
        (EXPERTS + _add("%experts, %r"), "y=%y, z=%experts"),
        (EXPERTS + _add("%experts, %row"), "y=%y"),
        (EXPERTS + _add("%experts, %r", name="both") + _add("%both, %x"), "y=%y"),
    ],
)
def test_other_programs_are_refused(calls: str, result: str) -> None:
    program = _program(calls, result)
    assert program.bucket is not None
    with pytest.raises(Refused, match="calls that are not experts and an add"):
        lower_region(program, Schedule(sm=90, cores=132, bucket=program.bucket))
