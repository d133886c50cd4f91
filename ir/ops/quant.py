"""The op that multiplies by a weight in any storage format, quantized or plain."""

import torch
import torch.nn.functional as F

from ingot.ir.formats import dequantize, find_format, quantize
from ingot.ir.ops.dense import check_bias, linear
from ingot.ir.ops.registry import Sample, define, wide
from ingot.ir.placements import Call, Fit, Spot, whole
from ingot.ir.types import DTYPE_NAMES, Split


def _samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    x, bias = torch.randn(5, 64, generator=g).to(dtype), torch.randn(24, generator=g).to(dtype)
    samples = []
    for format, last in (("int8", ()), ("int4_g32", (bias,)), ("int8_g64", ())):
        parts = quantize(torch.randn(24, 64, generator=g), find_format(format))
        samples.append(Sample((x, *parts.values(), *last), {"format": format}))
    plain = torch.randn(24, 64, generator=g).to(dtype)
    return [
        *samples,
        Sample((x, plain), {"format": "plain"}),
        Sample((x, plain, None, None, bias), {"format": "plain"}),
    ]


def _flops(x: torch.Tensor, weight: torch.Tensor, *_: torch.Tensor | None, format: str) -> int:
    return 2 * x.numel() * find_format(format).shape_of(tuple(weight.shape))[0]


def _fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor | None = None,
    zeros: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
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
    named = {"weight": weight, "scales": scales, "zeros": zeros}
    given = {name: part for name, part in named.items() if part is not None}
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
    sum: the sum over the ranks is still to be added. Scales and zeros are split like the packed elements.
    """
    weight, format = call.at["weight"], find_format(call.values["format"])
    if weight is None or weight.kind != "shard" or weight.dim > 1 or (weight.dim and weight.segments):
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
    *,
    format: str,
) -> torch.Tensor:
    """Return `x @ w.T + bias` [T, N] in x's dtype, for a quantized or plain weight w [N, K].

    x is [T, K], and bias is [N]. `format` is the storage format of w (`ingot.ir.formats`). `weight`, `scales` and
    `zeros` are the tensors that store w. With a lossless format, it computes like `linear`. With other formats, it
    computes in float32 or wider and rounds once.
    """
    found = find_format(format)
    if found.lossless:
        return linear.reference(x, dequantize(weight, scales, zeros, found), bias)  # type: ignore[no-any-return]
    full = wide(x)
    matrix = dequantize(weight, scales, zeros, found, full.dtype)
    return F.linear(full, matrix, None if bias is None else wide(bias)).to(x.dtype)
