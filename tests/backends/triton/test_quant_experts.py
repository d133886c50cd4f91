"""Experts with quantized weights by Triton kernels against the op's reference: one by one, and in blocks."""

from typing import Any

import pytest
import torch
from quant_experts_calls import call, check
from triton_schedules import TESTED, new_schedule, run_lowering, some

from ingot.backends.triton.lower.call import Call, Refused
from ingot.backends.triton.lower.experts.experts import LOWERINGS, lower_experts
from ingot.backends.triton.schedule import Value
from ingot.ir import ops
from ingot.ir.formats import find_format
from ingot.ir.formats.stacked import stack_types
from ingot.ir.ops.expert_weights import part_parameter
from ingot.ir.types import TensorType

pytestmark = pytest.mark.one_in_file(3)

# Formats of gate and up, and of down.
FORMATS = (
    *((name, name) for name in ("mxfp4", "int8", "int8_tensor", "int8_g64", "int4_g128", "int4_g32_asym", "nvfp4")),
    *((name, name) for name in ("fp8", "fp8_per_channel_per_token", "fp8_block128", "int8_w8a8", "mxfp8")),
    *(("f8e4m3/*x*:f32", "f8e4m3/128x128:f32"), ("i4/1x128:f32/low_first/x=i8:128", "i4/1x*:f32/low_first/x=i8:*")),
    *(("plain", "mxfp4"), ("mxfp4", "plain"), ("int8", "int4_g64"), ("fp8_block128", "mxfp4"), ("mxfp4", "fp8")),
)
dtypes = pytest.mark.parametrize("dtype", TESTED, ids=str)


# The interpreter takes a second for few rows of these weights, so they are the least that formats allow.
@dtypes
@pytest.mark.parametrize(
    ("up", "down", "hidden", "ffn"),
    some(
        2,
        [
            *(("mxfp4", "int8", 32, 16), ("int8", "mxfp4", 16, 32), ("int4_g32_asym", "int8", 32, 16)),
            *(("int8_w8a8", "nvfp4", 16, 32), ("int8_tensor", "int8_w8a8", 16, 16), ("fp8", "fp8", 16, 32)),
            *(("fp8_block128", "plain", 128, 16), ("plain", "fp8_block128", 16, 128), ("mxfp8", "fp8", 32, 16)),
            *(("f8e4m3/1x*:f32", "f8e4m3/*x*:f32", 16, 32), ("int8", "f8e4m3/128x128:f32", 16, 128)),
        ],
    ),
)
@pytest.mark.parametrize("rows", [1])
def test_choices_one_by_one(rows: int, up: str, down: str, hidden: int, ffn: int, dtype: torch.dtype) -> None:
    check(*call((up, down), rows, dtype, hidden=hidden, ffn=ffn, biases=True), block=1)


# Several blocks of columns of each expert, rows that are no multiple of those of a program, and two tokens.
@dtypes
@pytest.mark.parametrize(("hidden", "ffn"), some(1, [(16, 2064), (48, 37 * 16)]))
def test_many_columns_one_by_one(hidden: int, ffn: int, dtype: torch.dtype) -> None:
    check(*call(("plain", "f8e4m3/1x*:f32"), 2, dtype, hidden=hidden - 3, ffn=ffn, experts=3), block=1)


@dtypes
@pytest.mark.parametrize(("up", "down"), some(3, FORMATS))
@pytest.mark.parametrize("rows", some(1, [3, 16, 33, 65]))
def test_blocks(rows: int, up: str, down: str, dtype: torch.dtype) -> None:
    check(*call((up, down), rows, dtype, biases=rows % 2 == 1), block=16)


# Widths that are no multiple of a tile, of a block of columns, or of the rows that share a scale.
@dtypes
@pytest.mark.parametrize(
    ("formats", "hidden", "ffn"),
    some(
        3,
        [
            *((("mxfp4", "mxfp4"), 96, 160), (("mxfp4", "mxfp4"), 288, 32), (("int8", "int8"), 144, 80)),
            *((("fp8_block128", "f8e4m3/128x128:f32"), 384, 208), (("int4_g32_asym", "int8"), 352, 48)),
            *((("int8_g32", "int8_g32"), 160, 96), (("int8", "int8"), 70, 37), (("nvfp4", "nvfp4"), 144, 48)),
        ],
    ),
    ids=str,
)
@pytest.mark.parametrize("rows", [9])
def test_odd_shapes(rows: int, formats: tuple[str, str], hidden: int, ffn: int, dtype: torch.dtype) -> None:
    check(*call(formats, rows, dtype, hidden=hidden, ffn=ffn, biases=rows == 9), block=16)


@dtypes
@pytest.mark.parametrize("rows", [18])
@pytest.mark.parametrize("activation", some(1, ["gelu", "gelu_tanh", "clamped"]))
def test_activations(activation: str, rows: int, dtype: torch.dtype) -> None:
    options = {"activation": activation, "limit": 0.4, "alpha": 1.5}
    check(*call(("mxfp4", "mxfp4"), rows, dtype, hidden=64, ffn=64, biases=True, **options))


@dtypes
@pytest.mark.parametrize(("up", "down"), some(1, [("mxfp4", "mxfp4"), ("int8", "int8"), ("int4_g32_asym", "int8_g64")]))
def test_batch_invariant(up: str, down: str, dtype: torch.dtype) -> None:
    """A row's bits are the same in steps of all sizes, with other rows that choose other experts."""
    args, kwargs = call((up, down), 5, dtype, hidden=128, ffn=64)
    lowering = LOWERINGS["experts"]
    found = [
        run_lowering(
            *(ops.experts, lowering, [one[:rows] if place < 3 else one for place, one in enumerate(args)], kwargs),
            tokens=(1, 64),
            dims={"T": rows},
            invariant=True,
        )[0][:1]
        for rows in (1, 4)
    ]
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize(
    ("format", "options", "reason"),
    [
        ("nf4", {}, "format nf4: no kernel for elements nf4"),
        ("u4/1x32:f16:zeros/low_first/ordered", {}, "no kernel for experts with columns in another order"),
        ("f8e4m3/1x*:f32/x=f8e4m3:static", {}, "no kernel for experts with a stored scale of x"),
        ("i8/1x*:f32/rotated_in=16", {}, "no kernel that rotates"),
        ("int8", {"weigh_input": True}, "no kernel for quantized experts whose inputs are weighed"),
    ],
)
def test_refused(format: str, options: dict[str, Any], reason: str) -> None:
    bf16, found = torch.bfloat16, find_format(format)
    types = {
        "x": TensorType(bf16, ("T", 64)),
        "weights": TensorType(torch.float32, ("T", 2)),
        "chosen": TensorType(torch.int32, ("T", 2)),
        "down": TensorType(bf16, (4, 64, 32)),
        **{part_parameter("gate_up", part): one for part, one in stack_types((4, 64, 64), found, bf16).items()},
    }
    values: dict[str, Value | None] = {name: Value(one, input=place) for place, (name, one) in enumerate(types.items())}
    attributes = {
        "activation": "silu",
        "limit": 7.0,
        "alpha": 1.7,
        "weigh_input": False,
        "identities": 0,
        "identity_parts": 1,
        **options,
    }
    attributes |= {"gate_up_format": format, "down_format": "plain"}
    with pytest.raises(Refused, match=reason):
        lower_experts(Call("experts", values, attributes, (types["x"],)), new_schedule())
