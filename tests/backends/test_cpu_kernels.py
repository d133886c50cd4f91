"""The cpu backend's kernels of a dense layer, each against its float64 reference, and row by row against itself."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from ingot.backends.cpu.calls.kernels import SUFFIXES
from ingot.backends.cpu.emit import Cpu
from ingot.ir.artifact.plan import FEW_TOKENS, BucketClass
from ingot.ir.backend import No, Yes
from ingot.ir.machine.target import Target
from ingot.ir.numerics.tolerances import compare
from ingot.ir.ops import OPS
from ingot.ir.ops.activations import ACTIVATIONS
from ingot.ir.program import Program, Stage
from ingot.ir.types import Dim, TensorType

pytestmark = pytest.mark.xdist_group("cpu-kernels")

DTYPES = list(SUFFIXES)
TOKENS = [1, 2, 4, 7, 16, 33]
# Tested in test_cpu.py and test_cpu_step.py.
ELSEWHERE = {
    f"ingot.{name}"
    for name in ("step_attention", "kv_append", "paged_attention", "partial_attention", "feed", "sample", "advance")
}
Args = tuple[tuple[Any, ...], dict[str, Any]]
Case = Callable[[torch.Generator, int, torch.dtype], Args]


def randn(g: torch.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=g).to(dtype)


def inside(g: torch.Generator, dtype: torch.dtype, tokens: int, width: int) -> torch.Tensor:
    """[tokens, width] as the middle of a wider product."""
    return randn(g, dtype, tokens, width + 11)[:, 5 : 5 + width]


def linear(n: int, k: int, bias: bool = False) -> Case:
    def case(g: torch.Generator, tokens: int, dtype: torch.dtype) -> Args:
        weight = randn(g, dtype, n, k) / k**0.5
        return (inside(g, dtype, tokens, k), weight.to(dtype), *([randn(g, dtype, n)] if bias else [])), {}

    return case


def norm(
    *shape: int,
    weight_axes: int = 1,
    weight_dtype: torch.dtype | None = None,
    shift: float = 0,
    bias: bool = False,
) -> Case:
    def case(g: torch.Generator, tokens: int, dtype: torch.dtype) -> Args:
        width = shape[0] * (shape[1] if len(shape) == 2 else 1)
        x = (inside(g, dtype, tokens, width) + shift).to(dtype)
        x = inside(g, dtype, tokens, width).copy_(x).unflatten(1, shape)
        of_weight = weight_dtype or dtype, *shape[len(shape) - weight_axes :]
        return (x, *(randn(g, *of_weight) for _ in range(1 + bias))), {"eps": 1e-5}

    return case


def add_rms_norm(dim: int, weight_dtype: torch.dtype | None = None) -> Case:
    def case(g: torch.Generator, tokens: int, dtype: torch.dtype) -> Args:
        x, residual = inside(g, dtype, tokens, dim), inside(g, dtype, tokens, dim)
        return (x, residual, randn(g, weight_dtype or dtype, dim)), {"eps": 1e-5}

    return case


def gate(width: int, scale: float = 1, **options: str) -> Case:
    def case(g: torch.Generator, tokens: int, dtype: torch.dtype) -> Args:
        merged = (randn(g, torch.float32, tokens, 2 * width) * scale).to(dtype)
        return (merged[:, :width], merged[:, width:]), options

    return case


def activation(width: int, **options: str) -> Case:
    return lambda g, tokens, dtype: ((inside(g, dtype, tokens, width),), options)


def heads_of(g: torch.Generator, dtype: torch.dtype, tokens: int, heads: int, dim: int) -> torch.Tensor:
    return inside(g, dtype, tokens, heads * dim).unflatten(1, (heads, dim))


def table_of(g: torch.Generator, rotary: int) -> torch.Tensor:
    angles = torch.rand(64, rotary // 2, generator=g) * 6
    return torch.cat([angles.cos(), angles.sin()], -1)


def positions_of(g: torch.Generator, tokens: int) -> torch.Tensor:
    return torch.randint(0, 64, (tokens,), generator=g, dtype=torch.int32)


def rope(heads: int, dim: int, rotary: int, interleaved: bool) -> Case:
    def case(g: torch.Generator, tokens: int, dtype: torch.dtype) -> Args:
        x = heads_of(g, dtype, tokens, heads, dim)
        return (x, positions_of(g, tokens), table_of(g, rotary)), {"interleaved": interleaved}

    return case


def append(heads: int, kv_heads: int, dim: int, rotary: int, normed: bool, interleaved: bool) -> Case:
    def case(g: torch.Generator, tokens: int, dtype: torch.dtype) -> Args:
        q, k, v = (heads_of(g, dtype, tokens, n, dim) for n in (heads, kv_heads, kv_heads))
        cache = randn(g, dtype, 5, 2, 16, kv_heads, dim)
        slots = torch.randperm(80, generator=g)[:tokens]
        slots[tokens // 2 + 1 :: 4] = -1
        weights = [randn(g, dtype, dim) for _ in range(2)] if normed else []
        args = (cache, q, k, v, positions_of(g, tokens), table_of(g, rotary), slots, *weights)
        return args, {"eps": 1e-6, "interleaved": interleaved}

    return case


CASES: dict[str, list[Case]] = {
    "linear": [
        *(linear(n, k) for n, k in ((1, 1), (3, 15), (5, 16), (9, 17), (64, 31), (65, 33), (130, 257), (4096, 256))),
        linear(71, 48, bias=True),
    ],
    "rms_norm": [norm(1), norm(17), norm(256), norm(4, 64), norm(3, 5), norm(48, weight_dtype=torch.float32)],
    "layer_norm": [
        *(norm(17, shift=9), norm(4, 40, weight_axes=2), norm(3, 5), norm(48, weight_dtype=torch.float32)),
        *(norm(17, shift=9, bias=True), norm(4, 40, weight_axes=2, weight_dtype=torch.float32, bias=True)),
    ],
    "add_rms_norm": [add_rms_norm(256), add_rms_norm(19), add_rms_norm(48, torch.float32)],
    "silu_mul": [gate(1), gate(33), gate(768), gate(64, 60)],
    "gelu_mul": [gate(33, approximate=kind) for kind in ("tanh", "none")]
    + [gate(64, 60, approximate=kind) for kind in ("tanh", "none")],
    "activate": [activation(33, kind=kind) for kind in ACTIVATIONS],
    "rope": [rope(3, 64, 64, False), rope(2, 80, 32, False), rope(5, 16, 16, True), rope(1, 34, 18, True)],
    "qk_norm_rope_append": [
        append(4, 2, 64, 64, True, False),
        append(6, 3, 34, 16, True, True),
        append(4, 1, 16, 16, False, False),
    ],
}


def call(library: Mapping[str, Callable[..., Any]], name: str, args: Args) -> tuple[torch.Tensor, ...]:
    """Results of the kernel, the states that it wrote among them."""
    given = [one.clone() if one.dim() == 5 else one for one in args[0]]
    result = library[f"ingot.{name}"](*given, **args[1])
    results = result if isinstance(result, tuple) else (result,)
    return (*results, given[0]) if OPS[name].states else results


def test_every_kernel_is_tested(library: Mapping[str, Callable[..., Any]]) -> None:
    assert {f"ingot.{name}" for name in CASES} | ELSEWHERE == set(library)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", CASES)
def test_it_is_the_float64_reference(
    name: str, tokens: int, dtype: torch.dtype, library: Mapping[str, Callable[..., Any]]
) -> None:
    g = torch.Generator().manual_seed(tokens)
    for case in CASES[name]:
        args = case(g, tokens, dtype)
        wide = [one.double() if one.is_floating_point() else one for one in args[0]]
        expected = OPS[name].reference(*wide, **args[1])
        expected = expected if isinstance(expected, tuple) else (expected,)
        for found, exact in zip(call(library, name, args), expected, strict=True):
            assert found.dtype == dtype and found.is_contiguous()
            # What the norm rounded is of the size of the larger of two elements, and turning them can leave little.
            problem = compare(found, exact, dtype, factor=8 if name == "qk_norm_rope_append" else 1)
            assert problem is None, f"{[list(one.shape) for one in args[0]]}: {problem}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_bits_of_a_row_do_not_depend_on_its_batch(
    name: str, dtype: torch.dtype, library: Mapping[str, Callable[..., Any]]
) -> None:
    by_row = {
        "linear": 1,
        "rms_norm": 1,
        "layer_norm": 1,
        "add_rms_norm": 2,
        "silu_mul": 2,
        "gelu_mul": 2,
        "activate": 1,
        "rope": 2,
    }
    g = torch.Generator().manual_seed(5)
    for case in CASES[name]:
        args, options = case(g, 23, dtype)
        whole = call(library, name, (args, options))[0]
        rows = range(1, 7) if OPS[name].states else range(by_row[name])
        rows = [place for place in rows if place != 5]  # the rope table
        for count in (1, 2, 4, 6):
            for begin in (0, 11):
                some = [one[begin : begin + count] if place in rows else one for place, one in enumerate(args)]
                found = call(library, name, (tuple(some), options))[0]
                assert torch.equal(found, whole[begin : begin + count])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_infinity_and_nan_come_through(dtype: torch.dtype, library: Mapping[str, Callable[..., Any]]) -> None:
    values = torch.tensor([float("nan"), float("inf"), float("-inf"), 1e4, -1e4, 0.0], dtype=dtype)[None]
    ones = torch.ones_like(values)
    for name, options in (
        ("silu_mul", {}),
        ("gelu_mul", {"approximate": "tanh"}),
        ("gelu_mul", {"approximate": "none"}),
        *(("activate", {"kind": kind}) for kind in ACTIVATIONS),
    ):
        given = (values,) if name == "activate" else (values, ones)
        found = library[f"ingot.{name}"](*given, **options)[0]
        exact = OPS[name].reference(*(one.double() for one in given), **options)[0].to(dtype).double()
        same = torch.isclose(found.double(), exact, atol=1e-30, equal_nan=True)
        # The gate of -inf is -inf * 0.
        assert bool(same[[0, 1, 3, 4, 5]].all()), (name, found, exact)
    assert bool(library["ingot.linear"](values, ones)[0].isnan().all())
    assert bool(library["ingot.rms_norm"](values, ones[0], eps=1e-5)[0].isnan().all())


def claim(op: str, *types: TensorType | None, tokens: int = FEW_TOKENS, **options: Any) -> Yes | No:
    from ingot.ir import build

    program = Program("p", Stage.FUSED, {"T": Dim("T", 1, 64)})
    args = [one and program.add_input(f"x{place}", one) for place, one in enumerate(types)]
    node = build.call(program, OPS[op].overload, args, options)
    return Cpu().claim([node], Target.detect("cpu"), BucketClass(name="b", tokens=(1, tokens)))


F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64


def test_what_has_no_kernel_is_refused_with_the_reason() -> None:
    x = TensorType(BF16, ("T", 8))
    assert isinstance(claim("linear", x, TensorType(BF16, (4, 8))), Yes)
    refusals = {
        "the weight is not row-major: bf16[4, 8; 1, 4]": claim("linear", x, TensorType(BF16, (4, 8), (1, 4))),
        "no kernel for bf16 with f32": claim("linear", x, TensorType(F32, (4, 8))),
        "x is strided along its last axis: bf16[T, 8; 16, 2]": claim(
            "linear", TensorType(BF16, ("T", 8), (16, 2)), TensorType(BF16, (4, 8))
        ),
        "no kernel for f64": claim("silu_mul", *[TensorType(F64, ("T", 8))] * 2),
        "no kernel for a weight in f64 with x in bf16": claim("rms_norm", x, TensorType(F64, (8,)), eps=1e-5),
        "no kernel for ingot.soft_cap": claim("soft_cap", x, cap=3.0),
    }
    for reason, answer in refusals.items():
        assert isinstance(answer, No) and reason in answer.reason, (reason, answer)


def test_for_many_tokens_regions_rank_before_it() -> None:
    few, many = (claim("silu_mul", *[TensorType(BF16, ("T", 8))] * 2, tokens=n) for n in (FEW_TOKENS, FEW_TOKENS + 1))
    assert isinstance(few, Yes) and isinstance(many, Yes) and few.cost < 1.0 < many.cost
