"""The experts of many tokens on Hopper, by warpgroups that multiply or copy (`kernels/experts/warpgroups`)."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import in_one_of
from quant_experts_calls import call, check
from sm_90 import run_without_interpreter
from triton_schedules import DEVICE, new_schedule

from ingot.backends.triton.kernels.experts.groups import BEGIN, EXPERT, LISTED, SIZE, WORK, list_blocks
from ingot.backends.triton.lower.call import Call
from ingot.backends.triton.lower.experts.call import read_experts
from ingot.backends.triton.lower.experts.experts import lower_experts
from ingot.backends.triton.lower.experts.warpgroups import takes_warpgroups
from ingot.backends.triton.schedule import Value
from ingot.ir.formats import find_format
from ingot.ir.formats.stacked import stack_types
from ingot.ir.ops.expert_weights import part_parameter
from ingot.ir.types import TensorType

BF16 = torch.bfloat16
MXFP4, PLAIN = ("mxfp4", "mxfp4"), ("plain", "plain")
# Choices of experts: a full block and one of one choice, half a block, one more, almost a block, and none.
COUNTS = (129, 64, 65, 127, 0, 1, 256, 130, 300)
CLAMPED = {"activation": "clamped", "limit": 0.4, "alpha": 1.5}


def with_counts(formats: tuple[str, str], dtype: torch.dtype = BF16, **options: Any) -> tuple[list[Any], Any]:
    """A call in which COUNTS tokens, in any order, choose each expert. Each has one choice."""
    args, kwargs = call(formats, sum(COUNTS), dtype, experts=len(COUNTS), top_k=1, **options)
    chosen = torch.arange(len(COUNTS)).repeat_interleave(torch.tensor(COUNTS))
    args[2] = chosen[torch.randperm(len(chosen), generator=torch.Generator().manual_seed(5))][:, None].int()
    return args, kwargs


# Chunks of 64 and of 128 columns, fewer steps than stages and more, and rows that no tile divides.
@pytest.mark.gpu
@pytest.mark.parametrize(("hidden", "ffn"), [(64, 64), (128, 192), (192, 128), (256, 384), (320, 576), (512, 256)])
@pytest.mark.parametrize(("formats", "dtype"), [(MXFP4, BF16), (PLAIN, BF16), (PLAIN, torch.float16)], ids=str)
@pytest.mark.parametrize("biases", [False, True])
def test_blocks(hidden: int, ffn: int, formats: tuple[str, str], dtype: torch.dtype, biases: bool) -> None:
    options = CLAMPED if biases else {"activation": "silu"}
    check(*with_counts(formats, dtype, hidden=hidden, ffn=ffn, biases=biases, **options), block=128)


@pytest.mark.gpu
@pytest.mark.parametrize("formats", [MXFP4, PLAIN])
@pytest.mark.parametrize("tokens", [700, 1500])
def test_several_choices_of_a_token(tokens: int, formats: tuple[str, str]) -> None:
    """Without a block that is asked for, as a compile does, for the least and the most blocks of a step.

    With more items than multiprocessors, programs take several.
    """
    check(*call(formats, tokens, BF16, experts=8, top_k=3, hidden=1088, ffn=960, biases=True, **CLAMPED))
    args, kwargs = call(formats, tokens, BF16, experts=8, top_k=3, hidden=1088, ffn=960, biases=True)
    args[2] = torch.arange(3).expand(tokens, 3).int().contiguous()
    check(args, kwargs)


@pytest.mark.gpu
@pytest.mark.parametrize("formats", [MXFP4, PLAIN])
@pytest.mark.parametrize(("hidden", "ffn"), [(64, 64), (128, 192), (192, 128), (384, 256)])
@pytest.mark.parametrize("cores", [1, 3])
def test_many_items_of_a_program(cores: int, hidden: int, ffn: int, formats: tuple[str, str]) -> None:
    """More than there are numbers in shared memory, each with fewer steps than stages, as many, and more."""
    check(*with_counts(formats, hidden=hidden, ffn=ffn, biases=True), block=128, cores=cores)


@pytest.mark.gpu
def test_rows_apart() -> None:
    """A slice of wider rows, which begin at 16 bytes."""
    args, kwargs = with_counts(PLAIN, hidden=192, ffn=128)
    wide = torch.full((args[0].shape[0], 208), float("nan"), dtype=BF16)
    wide[:, :192] = args[0]
    args[0] = wide[:, :192]
    check(args, kwargs, block=128)


@pytest.mark.gpu
@pytest.mark.parametrize("formats", [("mxfp4", "plain"), ("plain", "mxfp4"), ("mxfp4", "int4_g128"), ("fp8", "mxfp4")])
def test_weights_in_two_formats(formats: tuple[str, str]) -> None:
    check(*with_counts(formats, hidden=256, ffn=128, biases=True), block=128)


@pytest.mark.gpu
@pytest.mark.parametrize("formats", [MXFP4, PLAIN])
def test_a_gate_that_the_kernel_does_not_know(formats: tuple[str, str]) -> None:
    check(*with_counts(formats, hidden=192, ffn=192, biases=True, activation="gelu_tanh"), block=128)


@pytest.mark.gpu
def test_weights_of_inputs() -> None:
    check(*with_counts(PLAIN, hidden=192, ffn=192, weigh_input=True), block=128)


@pytest.mark.gpu
@pytest.mark.parametrize("formats", [MXFP4, PLAIN])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_stay_in_their_row(bad: float, formats: tuple[str, str]) -> None:
    args, kwargs = with_counts(formats, hidden=192, ffn=128)
    args[0][70, 150] = bad
    check(args, kwargs, block=128)


@pytest.mark.parametrize(
    "counts", [(0, 5, 4, 3, 9, 0, 8, 1), (0, 0, 0, 0), (4,), (3, 3, 3, 3), (8, 8, 8, 0), (0, 0, 30, 0, 0)]
)
def test_every_choice_is_in_one_block(counts: tuple[int, ...]) -> None:
    tokens, experts = 4, len(counts)
    listed = torch.full((sum(counts) + 1, LISTED.value), -7, dtype=torch.int32, device=DEVICE)
    work = torch.full((WORK.value,), -7, dtype=torch.int32, device=DEVICE)
    given = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
    list_blocks[(experts,)](given, listed, work, experts, 1 << (experts - 1).bit_length(), tokens, False)
    blocks, *taken = work.tolist()
    assert blocks == sum(-(-count // tokens) for count in counts) and taken == [0, 0]
    found = []
    for row in listed.tolist()[:blocks]:
        assert 1 <= row[SIZE.value] <= tokens and row[BEGIN.value] == len(found)
        found += row[SIZE.value] * [row[EXPERT.value]]
    assert found == [expert for expert, count in enumerate(counts) for _ in range(count)]
    assert (listed[blocks:] == -7).all()


def experts_call(formats: tuple[str, str], dtype: torch.dtype = BF16, hidden: int = 192, ffn: int = 128) -> Call:
    types = {
        "x": TensorType(dtype, ("T", hidden)),
        "weights": TensorType(torch.float32, ("T", 2)),
        "chosen": TensorType(torch.int32, ("T", 2)),
    }
    for name, format, shape in zip(("gate_up", "down"), formats, ((4, 2 * ffn, hidden), (4, hidden, ffn)), strict=True):
        types |= {
            part_parameter(name, part): one for part, one in stack_types(shape, find_format(format), dtype).items()
        }
    values: dict[str, Value | None] = {name: Value(one, input=place) for place, (name, one) in enumerate(types.items())}
    attributes = {"activation": "silu", "limit": 7.0, "alpha": 1.7, "weigh_input": False, "identities": 0}
    attributes |= {"identity_parts": 1, "gate_up_format": formats[0], "down_format": formats[1]}
    return Call("experts", values, attributes, (types["x"],))


def test_other_weights_have_other_kernels() -> None:
    """wgmma is an instruction of Hopper. A step of the kernel is 64 columns, and has two scales of a row in MXFP4."""

    def taken(given: Call, sm: int = 90, block: int = 128, name: str = "gate_up") -> bool:
        return takes_warpgroups(read_experts(given, sm, None), name, sm, block)

    for formats in (MXFP4, PLAIN):
        made = experts_call(formats)
        assert taken(made) and taken(made, name="down")
        assert not taken(made, sm=100) and not taken(made, sm=80)
        assert not taken(made, block=64)
        assert not taken(experts_call(formats, torch.float32))
        assert not taken(experts_call(formats, hidden=96)), "half a step"
        assert taken(experts_call(formats, hidden=96), name="down"), "down has rows of its own"
        gelu = replace(made, attributes={**made.attributes, "activation": "gelu"})
        assert not taken(gelu) and taken(gelu, name="down")
    assert taken(experts_call(PLAIN, torch.float16)) and not taken(experts_call(MXFP4, torch.float16))
    for format in ("nvfp4", "int4_g128", "mxfp8"):
        assert not taken(experts_call((format, "plain"), hidden=256))
    plain = experts_call(PLAIN)
    weighed = replace(plain, attributes={**plain.attributes, "weigh_input": True})
    assert not taken(weighed) and taken(weighed, name="down")
    x = Value(TensorType(BF16, ("T", 192), (196, 1)), input=0)
    assert not taken(replace(plain, values={**plain.values, "x": x})), "rows that do not begin at 16 bytes"


@pytest.mark.parametrize(
    ("formats", "listing", "multiplying"),
    [(MXFP4, 1, 2), (("mxfp4", "plain"), 1, 2), (("int8", "plain"), 1, 1), (("int8", "int8"), 0, 0)],
)
def test_blocks_are_listed_once(formats: tuple[str, str], listing: int, multiplying: int) -> None:
    schedule = new_schedule((65, 8192))
    lower_experts(experts_call(formats), schedule)
    names = [launch.kernel.__name__ for launch in schedule.launches]
    assert (names.count("list_blocks"), names.count("experts_warpgroups")) == (listing, multiplying)
    # In deterministic mode, a row's machine code does not depend on how many choices its block has.
    schedule = new_schedule((65, 8192), invariant=True)
    lower_experts(experts_call(formats), schedule)
    assert "experts_warpgroups" not in [launch.kernel.__name__ for launch in schedule.launches]


# Triton's own disassembly leaves out parts of a kernel in Triton 3.6.
SCRIPT = """
import json
import subprocess
import tempfile

import triton

from ingot.backends.triton.tune import device
from ingot.backends.triton.tune.device import Machine, compile_launches
from ingot.backends.triton.tune.experts import Mixture, make_schedule

device.DEVICE = "cpu"
found = []
for mixture in (
    Mixture(2880, 2880, 32, 4, biases=True, activation="clamped", formats=("mxfp4", "mxfp4")),
    Mixture(2048, 768, 128, 8),
):
    schedule, _ = make_schedule(Machine(90, 132), mixture, 4096, block=128)
    schedule.launches = [one for one in schedule.launches if one.kernel.__name__ == "experts_warpgroups"]
    for made in compile_launches(schedule, {"T": 4096}):
        with tempfile.NamedTemporaryFile() as file:
            file.write(made.asm["cubin"])
            file.flush()
            shown = [triton.knobs.nvidia.cuobjdump.path, "-sass", file.name]
            sass = subprocess.run(shown, capture_output=True, text=True, check=True).stdout
        found.append([made.metadata.num_warps, made.metadata.shared, made.asm["ptx"], sass])
print(json.dumps(found))
"""


@in_one_of(3)
def test_tensor_cores_do_not_wait(tmp_path: Path) -> None:
    """A step waits for matmuls once: of f4e2m1 when the next elements are converted, else for those of the step before.

    Both warpgroups have a loop with matmuls of all columns, and one with half of them. No step spills registers.
    """
    (tmp_path / "compiled.py").write_text(SCRIPT)
    compiled = run_without_interpreter(tmp_path / "compiled.py")
    assert len(compiled) == 4
    for place, (warps, shared, ptx, sass) in enumerate(compiled):
        assert warps == 12 and shared <= 227 << 10
        assert ptx.index("griddepcontrol.wait") < ptx.index("ld.global")
        waits = re.findall(r"DEPBAR\.LE gsb0, (0x\d)", sass)
        steps = re.findall(r"(?:HGMMA(?:(?!DEPBAR).)*?){8}DEPBAR", sass, re.DOTALL)
        assert len(steps) == 4 and sass.count("HGMMA") == 32, "matmuls are serialised"
        assert not any("STL" in step or "LDL" in step for step in steps)
        if place < 2:
            assert waits == ["0x0"] * 4
            for step in steps:
                assert step.rpartition("HGMMA")[2].count("HMUL2") == 16, "elements are converted after the wait"
        else:
            assert sorted(waits) == ["0x0"] * 4 + ["0x2"] * 4
