"""The op that multiplies by a weight in any storage format, quantized or plain."""

from dataclasses import replace

import torch
import torch.nn.functional as F

from ingot.ir.formats import (
    PARTS,
    Activations,
    Format,
    Scales,
    dequantize,
    dequantize_rotated,
    find_format,
    format_of,
    named,
    quantize,
)
from ingot.ir.formats.rotation import rotated
from ingot.ir.ops.dense import check_bias, linear
from ingot.ir.ops.registry import Sample, define, wide
from ingot.ir.placements import Call, Fit, Spot, whole
from ingot.ir.types import DTYPE_NAMES, Split

# A format with every part that recipes of checkpoints make, besides those of the presets.
_ORDERED = format_of("u4", (Scales(1, 32, zeros=True, dtype=torch.float16),), packing="low_first", ordered=True)
_OFFSETS = format_of("u4", (Scales(1, 32, offsets=True),), packing="low_first")
_NVFP4 = format_of(
    "f4e2m1",
    (Scales(1, 16, dtype=torch.float8_e4m3fn), Scales(1, 0)),
    Activations("f4e2m1", 16, torch.float8_e4m3fn, stored=True),
    "low_first",
)
_ROTATED = format_of("i8", (Scales(),), Activations("i8"), rotated_in=16, rotated_out=6)
_STATIC = format_of("f8e4m3", (Scales(0, 0),), Activations("f8e4m3", stored=True, dynamic=False))


def _samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    x, bias = torch.randn(5, 64, generator=g).to(dtype), torch.randn(24, generator=g).to(dtype)
    samples = []
    for name, last in (
        ("int8", ()),
        ("int4_g32_asym", (bias,)),
        ("int8_g64", ()),
        ("int4_g32", ()),
        ("int8_w8a8", ()),
        ("fp8_per_channel_per_token", ()),
        ("mxfp4", ()),
    ):
        parts = quantize(torch.randn(24, 64, generator=g), find_format(name))
        samples.append(Sample((x, *parts.values(), *last), {"format": name}))
    plain = torch.randn(24, 64, generator=g).to(dtype)
    return [
        *samples,
        *(_sample(x, bias, format, g) for format in (_ORDERED, _OFFSETS, _NVFP4, _STATIC, _ROTATED)),
        Sample((x, plain), {"format": "plain"}),
        Sample((x, plain, None, None, bias), {"format": "plain"}),
    ]


def _sample(x: torch.Tensor, bias: torch.Tensor, format: Format, g: torch.Generator) -> Sample:
    """Return a call with a weight in `format`, some of whose parts the weight alone does not determine."""
    bare = replace(format, ordered=False, activations=None, rotated_in=0, rotated_out=0)
    parts = quantize(torch.randn(24, x.shape[1], generator=g), named(bare))
    parts["order"] = torch.randperm(x.shape[1], generator=g).to(torch.int32)
    parts["input_scale"] = torch.full((1,), 1 / 64)
    for part, size in (("rotation_in", format.rotated_in), ("rotation_out", format.rotated_out)):
        parts[part] = torch.linalg.qr(torch.randn(size, size, generator=g)).Q if size else torch.empty(0)
    given = [parts[part] if part in format.parts else None for part in PARTS]
    weight, scales, zeros, *others = given
    return Sample((x, weight, scales, zeros, bias, *others), {"format": format.name})


def _flops(x: torch.Tensor, weight: torch.Tensor, *_: torch.Tensor | None, format: str) -> int:
    found = find_format(format)
    rows = found.shape_of(tuple(weight.shape))[0]
    tokens, columns = x.numel() // x.shape[-1], x.shape[-1]
    return 2 * tokens * (rows * columns + columns * found.rotated_in + rows * found.rotated_out)


def _fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor | None = None,
    zeros: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    outer: torch.Tensor | None = None,
    order: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
    rotation_in: torch.Tensor | None = None,
    rotation_out: torch.Tensor | None = None,
    *,
    format: str,
) -> torch.Tensor:
    """Return an empty result: the op's shape function, also for meta tensors.

    Raises ValueError if the stored tensors do not fit the format, such as scales of a wrong group size. Nothing else
    checks this.
    """
    found = find_format(format)
    if weight.dim() < 2:
        raise ValueError(f"format {format}: packed elements of shape {list(weight.shape)}")
    shape = found.shape_of(tuple(weight.shape))[0], x.shape[-1]
    if problem := found.obstacle(shape):
        raise ValueError(f"format {format}: {problem}")
    given = _given(weight, scales, zeros, offsets, outer, order, input_scale, rotation_in, rotation_out)
    wanted = found.types(shape, x.dtype if weight.is_floating_point() else weight.dtype)
    if given.keys() != wanted.keys():
        raise ValueError(f"format {format} has {', '.join(wanted)}, and {', '.join(given)} are given")
    for name, part in given.items():
        if part.dtype != wanted[name].dtype or tuple(part.shape) != wanted[name].shape:
            raise ValueError(
                f"format {format} has {name} {wanted[name]}, and {DTYPE_NAMES[part.dtype]}{list(part.shape)} are given"
            )
    return F.linear(x, x.new_empty(shape), bias)


def _placement(call: Call) -> Fit:
    """The placement rule of `quant_linear` for a weight [N, K] on a mesh axis.

    A weight split along N splits the result. A weight split along K needs x split along K. The result is then a partial
    sum: the sum over the ranks is still to be added. Scales and zeros are split like the packed elements. A weight
    whose columns must stay together is never split along K.
    """
    weight, format = call.at["weight"], find_format(call.values["format"])
    if weight is None or weight.kind != "shard" or weight.dim > 1 or (weight.dim and weight.segments):
        return whole(call)
    if weight.dim == 1 and format.whole_columns():
        return whole(call)
    tile, last = format.layout.tile[weight.dim], len(call.types["x"].shape) - 1
    split = Split(call.axis, weight.dim, tuple(size * tile for size in weight.segments))
    needs: dict[str, Spot] = {"weight": weight}
    for part in format.parts[1:]:
        if part in call.types and (own := format.split(split, part)) is not None:
            needs[part] = call.shard(own.dim, own.segments)
    if weight.dim == 0:
        bias = {"bias": call.shard(0, split.segments)} if "bias" in call.types else {}
        return Fit({**needs, **bias}, call.shard(last, split.segments))
    check_bias(call)
    return Fit({**needs, "x": call.shard(last)}, call.partial)


@define(
    rows=("x",),
    samples=_samples,
    fake=_fake,
    flops=_flops,
    multiplies=True,
    placement=_placement,
)
def quant_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor | None = None,
    zeros: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    outer: torch.Tensor | None = None,
    order: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
    rotation_in: torch.Tensor | None = None,
    rotation_out: torch.Tensor | None = None,
    *,
    format: str,
) -> torch.Tensor:
    """Return `x @ w.T + bias` [T, N] in x's dtype, for a quantized or plain weight w [N, K].

    x is [T, K], and bias is [N]. `format` is the storage format of w (`ingot.ir.formats`). The other tensors are the
    parts that store w. If the format rotates the input, x is rotated first. If it has a rule for activations, x is then
    rounded by it. With a lossless format, it computes like `linear`. With other formats, it computes in float32 or
    wider and rounds once.
    """
    found = find_format(format)
    given = _given(weight, scales, zeros, offsets, outer, order, input_scale, rotation_in, rotation_out)
    if found.lossless:
        return linear.reference(x, dequantize(given, found), bias)  # type: ignore[no-any-return]
    full = wide(x)
    if rotation_in is not None:
        full = rotated(full, rotation_in)
    if found.activations is not None:
        full = found.activations.rounded(full, input_scale)
    matrix = dequantize_rotated(given, found, full.dtype).to(full.dtype)
    if rotation_out is None:
        return F.linear(full, matrix, None if bias is None else wide(bias)).to(x.dtype)
    result = rotated(F.linear(full, matrix), rotation_out)
    return (result if bias is None else result + wide(bias)).to(x.dtype)


def _given(*parts: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Return the parts that a call passes, by name. `parts` are in the order of `PARTS`."""
    return {name: part for name, part in zip(PARTS, parts, strict=True) if part is not None}
