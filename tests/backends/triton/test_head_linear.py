"""`head_linear` by Triton kernels: against its reference, for each class of steps, and the bits of a row."""

import pytest
import torch
from call_cases import cases
from chained_products import chain_products
from triton_checks import check_lowering
from triton_schedules import DEVICE, TESTED, new_schedule, run_lowering

from ingot.backends.triton.lower.call import Call, Refused
from ingot.backends.triton.lower.table import LOWERINGS
from ingot.backends.triton.schedule import Schedule, Value
from ingot.ir.ops import head_linear
from ingot.ir.types import TensorType

LOWERING = LOWERINGS["head_linear"]
CLASSES = ((1, 1), (2, 16), (17, 32), (33, 64), (65, 8192))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", TESTED)
@pytest.mark.parametrize("tokens", CLASSES, ids=str)
def test_calls(tokens: tuple[int, int], dtype: torch.dtype) -> None:
    """Each call in the class of its tokens, and in that of many; the interpreter gets few large ones."""
    for number, call in enumerate(cases("head_linear", dtype)):
        rows, many = call.args[0].shape[0], tokens == CLASSES[-1]
        if DEVICE == "cpu" and (number >= 10 if many else rows * call.args[1].numel() > 10_000_000):
            continue
        if many or tokens[0] <= rows <= tokens[1]:
            check_lowering(head_linear, LOWERING, call.args, {}, tokens=tokens, dims={"T": rows})


@pytest.mark.parametrize("dtype", TESTED)
def test_a_row_has_the_same_bits_in_every_step(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    chain_products(monkeypatch)
    g = torch.Generator().manual_seed(5)
    x, weight = torch.randn(70, 2, 100, generator=g).to(dtype), torch.randn(2, 40, 100, generator=g).to(dtype)

    def product(begin: int, end: int) -> torch.Tensor:
        tokens = next(one for one in CLASSES if end - begin <= one[1])
        args = (x[begin:end], weight)
        (found,) = run_lowering(head_linear, LOWERING, args, {}, tokens=tokens, dims={"T": end - begin}, invariant=True)
        return found

    whole = product(0, 70)
    for begin, end in ((0, 1), (64, 67), (30, 50), (2, 66)):
        assert torch.equal(product(begin, end), whole[begin:end]), f"rows {begin} to {end}"


def _call(x: TensorType, weight: TensorType) -> Call:
    result = TensorType(x.dtype, (*x.shape[:2], weight.shape[1]))
    return Call("head_linear", {"x": Value(x, input=0), "weight": Value(weight, input=1)}, {}, (result,))


def test_weights_are_spread_over_the_device() -> None:
    """DeepSeek-V2-Lite's 16 heads and DeepSeek-V3's 128, absorbed and back: programs for all multiprocessors, and no
    more weights than registers hold."""
    bf16 = torch.bfloat16
    for heads in (16, 128):
        for n, k in ((512, 128), (128, 512)):
            for tokens in CLASSES[:-1]:
                turned = (n * k, 1, n) if n > k else None
                x, weight = TensorType(bf16, ("T", heads, k)), TensorType(bf16, (heads, n, k), turned)
                schedule = new_schedule(tokens)
                LOWERING(_call(x, weight), schedule)
                (launch,) = schedule.launches
                grid = launch.grid
                assert isinstance(grid[0], int) and grid[1] == heads and grid[0] * heads >= 128
                held = launch.constants["BLOCK_N"] * launch.constants["BLOCK_K"]
                assert held <= 64 * 32 * launch.warps


def test_refuses() -> None:
    x, weight = TensorType(torch.bfloat16, ("T", 2, 8)), TensorType(torch.bfloat16, (2, 4, 8))
    f32 = torch.float32

    def refused(x: TensorType, weight: TensorType, reason: str, schedule: Schedule | None = None) -> None:
        with pytest.raises(Refused, match=reason):
            LOWERING(_call(x, weight), schedule or new_schedule())

    refused(x, TensorType(f32, (2, 4, 8)), "differ in dtype")
    refused(TensorType(torch.float64, ("T", 2, 8)), TensorType(torch.float64, (2, 4, 8)), "kernels compute on f32")
    refused(TensorType(f32, ("T", 2, 8), (16, 1, 2)), TensorType(f32, (2, 4, 8)), "strided along its last")
    refused(TensorType(f32, ("P", 2, 8)), TensorType(f32, (2, 4, 8)), "of 'P' rows")
    refused(x, weight, "compute capability 10.0", new_schedule(sm=100, invariant=True))
