"""The experts of a mixture by Triton kernels against the op's reference, for steps of all sizes and all routings."""

import math
from typing import Any

import pytest
import torch
from experts_oracle import experts_difference
from odd_samples import odd_samples
from triton_schedules import DEVICE, TESTED, new_schedule, run_lowering, some

from ingot.backends.triton.lower.call import Call, Refused
from ingot.backends.triton.lower.experts.experts import LOWERINGS
from ingot.backends.triton.schedule import Value
from ingot.ir import ops
from ingot.ir.types import TensorType

pytestmark = pytest.mark.one_in_file(3)

LOWERING, OP = LOWERINGS["experts"], ops.experts
# Classes of steps: one token alone, a few alone and others in blocks, blocks, and blocks of several sizes.
CLASSES = ((1, 1), (2, 16), (17, 32), (33, 64), (65, 8192))
dtypes = pytest.mark.parametrize("dtype", TESTED, ids=str)


def routed(routing: str, tokens: int, experts: int, top_k: int, g: torch.Generator) -> torch.Tensor:
    """The chosen experts: the same for all rows, evenly many rows for each, or at random."""
    if routing == "same":
        return torch.arange(top_k).expand(tokens, top_k).flip(1).int().contiguous()
    if routing == "uniform":
        return (torch.arange(tokens * top_k).view(tokens, top_k) % experts).int()
    return torch.rand(tokens, experts, generator=g).argsort(-1)[:, :top_k].int().contiguous()


def call(
    tokens: int,
    experts: int,
    top_k: int,
    hidden: int,
    ffn: int,
    dtype: torch.dtype,
    routing: str = "random",
    biases: bool = False,
) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(tokens + experts)

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=g) / math.sqrt(shape[-1])).to(dtype)

    chosen = routed(routing, tokens, experts, top_k, g)
    args = (torch.randn(tokens, hidden, generator=g).to(dtype), torch.rand(tokens, top_k, generator=g), chosen)
    args += (draw(experts, 2 * ffn, hidden), draw(experts, hidden, ffn))
    return (*args, draw(experts, 2 * ffn), draw(experts, hidden)) if biases else args


def check(args: tuple[Any, ...], kwargs: dict[str, Any], tokens: tuple[int, int]) -> None:
    (found,) = run_lowering(OP, LOWERING, args, kwargs, tokens=tokens, dims={"T": args[0].shape[0]})
    assert (problem := experts_difference(args, kwargs, found.cpu())) is None, f"{kwargs}: {problem}"


@pytest.mark.one_in(3)
@dtypes
@pytest.mark.parametrize("tokens", CLASSES, ids=str)
def test_samples(tokens: tuple[int, int], dtype: torch.dtype) -> None:
    """A step may have fewer tokens than its class, as rows of logits have: their programs are those of the class."""
    for sample in OP.samples(torch.Generator().manual_seed(1), dtype) + odd_samples("experts", dtype):
        if sample.kwargs.get("identities"):
            with pytest.raises(Refused, match="no kernel for experts that return their input"):
                check(sample.args, dict(sample.kwargs), tokens)
            continue
        rows = sample.args[0].shape[0]
        bounds = (min(rows, tokens[0]), max(rows, tokens[1]))
        check(sample.args, dict(sample.kwargs), bounds)


@pytest.mark.one_in(3)
@dtypes
@pytest.mark.parametrize("routing", ["same", "uniform", "random"])
@pytest.mark.parametrize("rows", some(2, [1, 2, 3, 9, 16, 31, 64, 65, 100]))
def test_routings(rows: int, routing: str, dtype: torch.dtype) -> None:
    """Blocks that are full, of one choice, and absent; sizes that are no multiples of a tile."""
    tokens = next(bounds for bounds in CLASSES if rows <= bounds[1])
    check(call(rows, 11, 3, 70, 37, dtype, routing, biases=rows % 2 == 0), {}, tokens)


@dtypes
def test_ranges_of_one_class(dtype: torch.dtype) -> None:
    """Steps of one class with different launches: the others have empty grids."""
    for rows in (65, 97, 500) if DEVICE == "cuda" else (65,):
        check(call(rows, 8, 2, 48, 32, dtype), {}, (65, 8192))
    for rows in (2, 4, 5, 16) if DEVICE == "cuda" else (4, 5):
        check(call(rows, 40, 2, 48, 32, dtype), {}, (2, 16))


@pytest.mark.one_in(2)
@dtypes
@pytest.mark.parametrize("weigh_input", [False, True])
@pytest.mark.parametrize("rows", [1, 6])
def test_forms(rows: int, weigh_input: bool, dtype: torch.dtype) -> None:
    for options in (
        {"activation": "silu"},
        {"activation": "gelu"},
        {"activation": "gelu_tanh"},
        {"activation": "clamped", "limit": 0.4, "alpha": 1.5},
    ):
        tokens = (1, 1) if rows == 1 else (2, 16)
        check(call(rows, 4, 2, 40, 24, dtype, biases=True), {**options, "weigh_input": weigh_input}, tokens)


@dtypes
def test_a_token_may_choose_an_expert_twice(dtype: torch.dtype) -> None:
    args = list(call(7, 4, 3, 40, 24, dtype))
    args[2] = torch.tensor([[1, 1, 1]] * 7, dtype=torch.int32)
    check(tuple(args), {}, (2, 16))


@dtypes
@pytest.mark.parametrize(("experts", "top_k", "rows"), [(1, 1, 3), (20, 16, 1), (20, 16, 3)])
def test_one_expert_and_many_choices(experts: int, top_k: int, rows: int, dtype: torch.dtype) -> None:
    check(call(rows, experts, top_k, 40, 24, dtype), {}, (1, 1) if rows == 1 else (2, 16))


@dtypes
def test_steps_without_tokens_compute_nothing(dtype: torch.dtype) -> None:
    args = [tensor[:0] if place < 3 else tensor for place, tensor in enumerate(call(1, 4, 2, 40, 24, dtype))]
    (found,) = run_lowering(OP, LOWERING, args, {}, tokens=(1, 16), dims={"T": 0})
    assert found.shape == (0, 40)


def types(**changed: TensorType) -> dict[str, TensorType]:
    bf16 = torch.bfloat16
    given = {
        "x": TensorType(bf16, ("T", 32)),
        "weights": TensorType(torch.float32, ("T", 2)),
        "chosen": TensorType(torch.int32, ("T", 2)),
        "gate_up": TensorType(bf16, (4, 32, 32)),
        "down": TensorType(bf16, (4, 32, 16)),
    }
    return given | changed


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"x": TensorType(torch.float64, ("T", 32))}, "kernels compute on f32, bf16 and f16"),
        ({"x": TensorType(torch.bfloat16, ("T", 32), (64, 2))}, "x is strided along its last axis"),
        ({"x": TensorType(torch.bfloat16, ("R", 32))}, "experts of 'R' rows"),
        ({"weights": TensorType(torch.bfloat16, ("T", 2))}, "the weights of choices are not f32"),
        ({"chosen": TensorType(torch.int32, ("T", 2), (4, 1))}, "chosen is not contiguous"),
        ({"gate_up": TensorType(torch.float16, (4, 32, 32))}, "a matmul of bf16 and f16"),
        ({"down": TensorType(torch.bfloat16, (4, 32, 16), (1024, 32, 1))}, "down is not contiguous"),
        ({"gate_up": TensorType(torch.bfloat16, (2000, 32, 32))}, "2000 experts, more than 1024"),
    ],
)
def test_refused(changed: dict[str, TensorType], reason: str) -> None:
    given = types(**changed)
    values: dict[str, Value | None] = {name: Value(one, input=place) for place, (name, one) in enumerate(given.items())}
    values |= {"gate_up_bias": None, "down_bias": None}
    attributes = {
        "activation": "silu",
        "limit": 7.0,
        "alpha": 1.7,
        "weigh_input": False,
        "identities": 0,
        "identity_parts": 1,
    }
    attributes |= {"gate_up_format": "plain", "down_format": "plain"}
    with pytest.raises(Refused, match=reason):
        LOWERING(Call("experts", values, attributes, (TensorType(torch.bfloat16, ("T", 32)),)), new_schedule())
