"""The ops of LoRA adapters by Triton kernels against their references."""

from typing import Any

import pytest
import torch
from call_cases import cases
from odd_samples import odd_samples
from triton_checks import check_lowering
from triton_schedules import DEVICE, TESTED, new_schedule, run_lowering

from ingot.backends.triton.lower.call import Call, Refused
from ingot.backends.triton.lower.linear import lora
from ingot.backends.triton.schedule import Value
from ingot.ir.ops import OPS
from ingot.ir.types import TensorType

FEW, MANY = (1, 64), (65, 8192)  # one row a program, and tiles of rows


@pytest.mark.parametrize("dtype", TESTED)
@pytest.mark.parametrize("tokens", [FEW, MANY], ids=["rows", "tiles"])
@pytest.mark.parametrize("name", lora.LOWERINGS)
def test_samples(name: str, tokens: tuple[int, int], dtype: torch.dtype) -> None:
    op = OPS[name]
    for sample in op.samples(torch.Generator().manual_seed(1), dtype) + odd_samples(name, dtype):
        dims = {"T": sample.args[0].shape[0]}
        check_lowering(op, lora.LOWERINGS[name], sample.args, sample.kwargs, tokens=tokens, dims=dims)


@pytest.mark.parametrize("tokens", [FEW, MANY], ids=["rows", "tiles"])
@pytest.mark.parametrize("name", lora.LOWERINGS)
def test_sizes_of_models(name: str, tokens: tuple[int, int]) -> None:
    """The interpreter takes long for many rows, so the others run on a GPU."""
    for dtype in TESTED:
        found = cases(name, dtype)
        for call in found if DEVICE == "cuda" else found[-5:-4] if tokens == FEW else found[-2:-1]:
            dims = {"T": call.args[0].shape[0]}
            check_lowering(OPS[name], lora.LOWERINGS[name], call.args, call.kwargs, tokens=tokens, dims=dims)


@pytest.mark.parametrize("tokens", [FEW, MANY], ids=["rows", "tiles"])
@pytest.mark.parametrize("name", lora.LOWERINGS)
def test_a_row_has_the_same_bits_beside_other_adapters(name: str, tokens: tuple[int, int]) -> None:
    (call,) = odd_samples(name, torch.float32)
    place = list(OPS[name].parameters.names).index("slots")

    def first(slots: torch.Tensor) -> torch.Tensor:
        args: list[Any] = list(call.args)
        args[place] = slots
        dims = {"T": args[0].shape[0]}
        return run_lowering(OPS[name], lora.LOWERINGS[name], args, call.kwargs, tokens=tokens, dims=dims)[0][0]

    slots = call.args[place].clone()
    slots[0] = 1
    others = torch.full_like(slots, -1)
    others[0] = 1
    assert torch.equal(first(slots), first(others))


def test_refuses() -> None:
    y, shrunk = TensorType(torch.float32, ("T", 18)), TensorType(torch.float32, ("T", 36))
    slots, b = TensorType(torch.int32, ("T",)), TensorType(torch.float32, (2, 18, 4))
    types = {"y": y, "shrunk": shrunk, "slots": slots, "b": b}
    given = {name: Value(one, place) for place, (name, one) in enumerate(types.items())}
    with pytest.raises(Refused, match="9 parts"):
        lora.LOWERINGS["lora_expand"](Call("lora_expand", given, {"segments": [2] * 9}, (y,)), new_schedule())
