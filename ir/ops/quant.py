"""The ops that read a weight in any storage format: one multiplies by it, the other returns it as a matrix."""

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F

from ingot.ir.formats import (
    PARTS,
    Activations,
    Format,
    Scales,
    dequantize_rotated,
    find_format,
    format_of,
    named,
    quantize,
)
from ingot.ir.formats import dequantize as matrix_of
from ingot.ir.formats.format import KEPT
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


# The parts that the op `dequantize` reads.
_MATRIX_PARTS = PARTS[:6]


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
    given = _given(weight, scales, zeros, offsets, outer, order, input_scale, rotation_in, rotation_out)
    shape = _check_parts(given, find_format(format), x.shape[-1], x.dtype)
    return F.linear(x, x.new_empty(shape), bias)


def _check_parts(
    given: Mapping[str, torch.Tensor], format: Format, columns: int | None, dtype: torch.dtype
) -> tuple[int, int]:
    """Return the shape of the weight that the parts `given` store in `format`.

    It has `columns` columns; None: as many as its elements say. `dtype` is that of elements that keep their numbers, if
    they are no floats. Raises ValueError if the parts do not fit the format.
    """
    weight, name = given["weight"], format.name
    if weight.dim() < 2:
        raise ValueError(f"format {name}: packed elements of shape {list(weight.shape)}")
    rows, own = format.shape_of(tuple(weight.shape))
    shape = rows, own if columns is None else columns
    if problem := format.obstacle(shape):
        raise ValueError(f"format {name}: {problem}")
    wanted = format.types(shape, dtype if weight.is_floating_point() else weight.dtype)
    if given.keys() != wanted.keys():
        raise ValueError(f"format {name} has {', '.join(wanted)}, and {', '.join(given)} are given")
    for part, value in given.items():
        if value.dtype != wanted[part].dtype or tuple(value.shape) != wanted[part].shape:
            raise ValueError(
                f"format {name} has {part} {wanted[part]}, and {DTYPE_NAMES[value.dtype]}{list(value.shape)} are given"
            )
    return shape


def _placement(call: Call) -> Fit:
    """The placement rule of `quant_linear` for a weight [N, K] on a mesh axis.

    A weight split along N splits the result. A weight split along K needs x split along K. The result is then a partial
    sum: the sum over the ranks is still to be added.
    """
    found = _split_parts(call)
    if found is None:
        return whole(call)
    needs, split = found
    last = len(call.types["x"].shape) - 1
    if split.dim == 0:
        bias = {"bias": call.shard(0, split.segments)} if "bias" in call.types else {}
        return Fit({**needs, **bias}, call.shard(last, split.segments))
    check_bias(call)
    return Fit({**needs, "x": call.shard(last)}, call.partial)


def _split_parts(call: Call) -> tuple[dict[str, Spot], Split] | None:
    """Return how the parts of a split weight [N, K] are split, and how the weight itself is; None if it stays whole.

    Scales and zeros are split like the packed elements. A weight whose columns must stay together is never split along
    K.
    """
    weight, format = call.at["weight"], find_format(call.values["format"])
    if weight is None or weight.kind != "shard" or weight.dim > 1 or (weight.dim and weight.segments):
        return None
    if weight.dim == 1 and format.whole_columns():
        return None
    tile = format.layout.tile[weight.dim]
    split = Split(call.axis, weight.dim, tuple(size * tile for size in weight.segments))
    needs: dict[str, Spot] = {"weight": weight}
    for part in format.parts[1:]:
        if part in call.types and (own := format.split(split, part)) is not None:
            needs[part] = call.shard(own.dim, own.segments)
    return needs, split


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
        return linear.reference(x, matrix_of(given, found), bias)  # type: ignore[no-any-return]
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


def _matrix_samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    formats = [find_format(name) for name in ("int8", "int4_g32_asym", "int8_g64", "int4_g32", "mxfp4")]
    # With scales of two levels, and with scales for blocks of rows and columns.
    formats += [_ORDERED, _OFFSETS, replace(_NVFP4, activations=None), format_of("f8e4m3", (Scales(6, 32),))]
    samples = []
    for format in map(named, formats):
        parts = quantize(torch.randn(24, 64, generator=g), named(replace(format, ordered=False)))
        if format.ordered:
            parts["order"] = torch.randperm(64, generator=g).to(torch.int32)
        given = tuple(parts.get(part) for part in _MATRIX_PARTS)
        samples.append(Sample(given, {"format": format.name, "dtype": dtype}))
    return samples


def _matrix_fake(
    weight: torch.Tensor,
    scales: torch.Tensor | None = None,
    zeros: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    outer: torch.Tensor | None = None,
    order: torch.Tensor | None = None,
    *,
    format: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return an empty matrix: the op's shape function, also for meta tensors.

    Raises ValueError if the format is not for the op, or if the stored tensors do not fit it.
    """
    found = find_format(format)
    if found.element == KEPT or found.activations is not None or found.rotated:
        raise ValueError(f"format {format} has no scales, rounds activations or rotates: a matrix does not replace it")
    shape = _check_parts(_given(weight, scales, zeros, offsets, outer, order), found, None, dtype)
    return weight.new_empty(shape, dtype=dtype)


def _matrix_placement(call: Call) -> Fit:
    """The placement rule of `dequantize`: a weight split along N or K splits the result in the same way."""
    found = _split_parts(call)
    if found is None:
        return whole(call)
    needs, split = found
    return Fit(needs, call.shard(split.dim, split.segments))


@define(
    samples=_matrix_samples,
    fake=_matrix_fake,
    flops=2,  # a zero point is subtracted, and a scale multiplies
    fusible=False,  # a kernel of its own, or the reference
    placement=_matrix_placement,
)
def dequantize(
    weight: torch.Tensor,
    scales: torch.Tensor | None = None,
    zeros: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    outer: torch.Tensor | None = None,
    order: torch.Tensor | None = None,
    *,
    format: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the weight [N, K] that the parts store in the format `format`, as a matrix of another dtype.

    Columns have their natural order. It computes in float32 (for float64, in float64) and rounds once, to `dtype`. The
    format has scales, and a linear with it neither rounds nor rotates its input.
    """
    found = find_format(format)
    given = _given(weight, scales, zeros, offsets, outer, order)
    full = torch.float64 if dtype is torch.float64 else torch.float32
    return matrix_of(given, found, full).to(dtype).contiguous()


def _given(*parts: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Return the parts that a call passes, by name. `parts` are in the order of `PARTS`, perhaps without the last."""
    return {name: part for name, part in zip(PARTS, parts, strict=False) if part is not None}
