"""The cpu backend's kernels of a dense layer, each against its float64 reference, and row by row against itself."""

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from ingot.backends.cpu.calls.kernels import SUFFIXES
from ingot.backends.cpu.calls.quant import unsupported
from ingot.backends.cpu.emit import Cpu
from ingot.ir.artifact.plan import FEW_TOKENS, BucketClass
from ingot.ir.backend import No, Yes
from ingot.ir.formats import find_format, quantize
from ingot.ir.machine.target import Target
from ingot.ir.numerics.tolerances import compare
from ingot.ir.ops import OPS
from ingot.ir.ops.activations import ACTIVATIONS
from ingot.ir.program import Program, Stage
from ingot.ir.types import Dim, TensorType

pytestmark = [pytest.mark.xdist_group("cpu-kernels"), pytest.mark.one_in_file(3)]

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


def quant_linear(format: str, n: int, k: int, bias: bool = False) -> Case:
    def case(g: torch.Generator, tokens: int, dtype: torch.dtype) -> Args:
        parts = quantize(torch.randn(n, k, generator=g) / k**0.5, find_format(format))
        last = [randn(g, dtype, n)] if bias else []
        return (inside(g, dtype, tokens, k), parts["weight"], parts["scales"], parts.get("zeros"), *last), {
            "format": format
        }

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
    # Sizes around the 64 or 128 columns that a register holds, and the 2048 of a block.
    "quant_linear": [
        *(quant_linear("int8", n, k) for n, k in ((1, 1), (3, 63), (9, 65), (17, 2049), (130, 257))),
        *(quant_linear("int4_g32", n, k) for n, k in ((1, 32), (9, 96), (130, 2144))),
        *(quant_linear("int4_g128_asym", n, k) for n, k in ((7, 128), (13, 2176))),
        *(quant_linear(name, 19, 96, bias=True) for name in ("int8", "int8_g32", "int4_g32", "int4_g32_asym", "mxfp4")),
        *(quant_linear(name, 11, 192) for name in ("int8_tensor", "int8_g64", "int4_g64", "i4/1x*:f16/low_first")),
        quant_linear("u4/1x16:bf16:zeros/low_first", 5, 48),
        quant_linear("u8/1x256:f16:zeros", 5, 768),
        quant_linear("iq4nl/1x32:f16/low_first", 5, 160),
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
    given = [one.clone() if one is not None and one.dim() == 5 else one for one in args[0]]
    found = results(library[f"ingot.{name}"](*given, **args[1]))
    return (*found, given[0]) if OPS[name].states else found


def results(value: Any) -> tuple[torch.Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def reference(name: str, args: Args, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    # Scales of a format keep their dtype.
    kept = {"scales"} if name == "quant_linear" else set()
    given = [
        one.to(dtype) if one is not None and one.is_floating_point() and place not in kept else one
        for place, one in zip(OPS[name].parameters.names, args[0], strict=False)
    ]
    return results(OPS[name].reference(*given, **args[1]))


def row_places(name: str) -> list[int]:
    """The places of the arguments that have a row for each token."""
    names = OPS[name].rows or ("q", "k", "v", "positions", "slots")
    return [place for place, one in enumerate(OPS[name].parameters.names) if one in names]


def test_every_kernel_is_tested(library: Mapping[str, Callable[..., Any]]) -> None:
    tested = {f"ingot.{name}" for name in CASES} | ELSEWHERE
    assert tested == set(library), "each kernel needs calls in CASES"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", CASES)
def test_it_is_the_float64_reference(
    name: str, tokens: int, dtype: torch.dtype, library: Mapping[str, Callable[..., Any]]
) -> None:
    g = torch.Generator().manual_seed(tokens)
    for case in CASES[name]:
        args = case(g, tokens, dtype)
        for found, exact in zip(call(library, name, args), reference(name, args), strict=True):
            assert found.dtype == dtype and found.is_contiguous()
            # What the norm rounded is of the size of the larger of two elements, and turning them can leave little.
            problem = compare(found, exact, dtype, factor=8 if name == "qk_norm_rope_append" else 1)
            assert problem is None, f"{[list(one.shape) for one in args[0]]}: {problem}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_bits_of_a_row_do_not_depend_on_its_batch(
    name: str, dtype: torch.dtype, library: Mapping[str, Callable[..., Any]]
) -> None:
    rows = row_places(name)
    g = torch.Generator().manual_seed(5)
    for case in CASES[name]:
        args, options = case(g, 23, dtype)
        whole = call(library, name, (args, options))[0]
        for count in (1, 2, 4, 6):
            for begin in (0, 11):
                some = [one[begin : begin + count] if place in rows else one for place, one in enumerate(args)]
                found = call(library, name, (tuple(some), options))[0]
                assert torch.equal(found, whole[begin : begin + count])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 1e4, -1e4, 0.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_infinity_and_nan_come_through(
    name: str, dtype: torch.dtype, value: float, library: Mapping[str, Callable[..., Any]]
) -> None:
    """A NaN or an infinity in one element of an operand is in the results where the float64 reference has it."""
    g = torch.Generator().manual_seed(6)
    for case, place in itertools.product(CASES[name], row_places(name)):
        args, options = case(g, 3, dtype)
        if not args[place].is_floating_point():
            continue
        args[place][1].view(-1)[:1] = value
        found_and_expected = zip(
            call(library, name, (args, options)),
            reference(name, (args, options)),
            reference(name, (args, options), torch.float32),
            strict=True,
        )
        for found, exact, single in found_and_expected:
            exact = exact.to(dtype)
            # Kernels may return any value for an infinity times 0, or over an infinity. Kernels compute in float32, in
            # which a factor may be 0 that is not in float64.
            undefined = (exact.isnan() | single.isnan()) & math.isinf(value)
            same = (found == exact) | (found.isnan() & exact.isnan())
            assert bool((same | exact.isfinite() | undefined).all()), (list(args[place].shape), place)
            plain = exact.isfinite()
            problem = compare(found[plain], exact[plain], dtype, factor=8)
            assert problem is None, f"{list(args[place].shape)}, operand {place}: {problem}"


def claim(op: str, *types: TensorType | None, tokens: int = FEW_TOKENS, **options: Any) -> Yes | No:
    from ingot.ir import build

    program = Program("p", Stage.FUSED, {"T": Dim("T", 1, 64)})
    args = [one and program.add_input(f"x{place}", one) for place, one in enumerate(types)]
    node = build.call(program, OPS[op].overload, args, options)
    return Cpu().claim([node], Target.detect("cpu"), BucketClass(name="b", tokens=(1, tokens)))


def quant_claim(format: str, tokens: int = FEW_TOKENS) -> Yes | No:
    types = find_format(format).types((32, 192), torch.bfloat16)
    given = [types.get(part) for part in ("weight", "scales", "zeros")]
    last = [None, types["offsets"]] if "offsets" in types else []
    return claim("quant_linear", TensorType(torch.bfloat16, ("T", 192)), *given, *last, tokens=tokens, format=format)


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
        "no kernel rounds activations": quant_claim("int8_w8a8"),
        "no kernel for elements f8e4m3 in the order 'plain'": quant_claim("f8e4m3/1x*:f32"),
        "no kernel for groups of 96 columns": quant_claim("i4/1x96:f32/low_first"),
        "no kernel for scales that 2 rows share": quant_claim("i8/2x32:f32"),
        "no kernel for the scales, offsets or order of the format 'u4/1x32:f32:offsets/low_first'": quant_claim(
            "u4/1x32:f32:offsets/low_first"
        ),
        "no kernel for f64": claim("silu_mul", *[TensorType(F64, ("T", 8))] * 2),
        "no kernel for a weight in f64 with x in bf16": claim("rms_norm", x, TensorType(F64, (8,)), eps=1e-5),
        "no kernel for ingot.soft_cap": claim("soft_cap", x, cap=3.0),
    }
    for reason, answer in refusals.items():
        assert isinstance(answer, No) and reason in answer.reason, (reason, answer)
    assert unsupported(find_format("i8/1x*:f32/rotated_in=16")) == "no kernel rotates the input or the result"


def test_for_many_tokens_regions_rank_before_it() -> None:
    few, many = (claim("silu_mul", *[TensorType(BF16, ("T", 8))] * 2, tokens=n) for n in (FEW_TOKENS, FEW_TOKENS + 1))
    assert isinstance(few, Yes) and isinstance(many, Yes) and few.cost < 1.0 < many.cost


def test_quantized_weights_are_read_in_steps_of_any_size() -> None:
    for tokens in (FEW_TOKENS, 512):
        answer = quant_claim("int4_g32", tokens)
        assert isinstance(answer, Yes) and answer.batch_invariant and answer.cost < 1.0


def test_every_code_is_its_number(library: Mapping[str, Callable[..., Any]]) -> None:
    """All codes of each element type, with a column that selects each: results are exact in bfloat16."""
    for format, codes in (
        ("int8", torch.arange(-128, 128, dtype=torch.int8)),
        ("u8/1x*:f32", torch.arange(256, dtype=torch.uint8)),
        *(
            (f"{name}/1x*:f32/low_first", torch.arange(16, dtype=torch.uint8))
            for name in ("i4", "u4", "f4e2m1", "iq4nl")
        ),
    ):
        found = find_format(format)
        packed = found.layout.pack(codes.repeat(3, 1)).contiguous()
        args = torch.eye(len(codes), dtype=torch.bfloat16), packed, torch.tensor([[1.0], [2.0], [-0.5]])
        for tokens in (1, 5, len(codes)):
            some = library["ingot.quant_linear"](args[0][:tokens], *args[1:], format=format)
            exact = OPS["quant_linear"].reference(args[0][:tokens].double(), *args[1:], format=format)
            assert torch.equal(some.double(), exact), format
