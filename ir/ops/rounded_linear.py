"""A matmul that rounds its input, as two ops: one rounds, the other multiplies the rounded numbers.

`quant_linear` with a format that rounds activations does both. Libraries multiply matrices of eight-bit elements, with
scales of rows and columns.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F

from ingot.ir.formats import ELEMENTS, Activations, Format, Scales, dequantize, find_format, format_of, named, quantize
from ingot.ir.ops.registry import Sample, define
from ingot.ir.placements import whole

_STATIC = format_of("f8e4m3", (Scales(0, 0),), Activations("f8e4m3", stored=True, dynamic=False))
_NAMES = ("int8_w8a8", "fp8", "fp8_per_channel_per_token", "fp8_block128")


def why_not_separate(format: Format) -> str:
    """Return why `round_rows` and `rounded_linear` do not replace `quant_linear` with this format; "" if they do."""
    rule = format.activations
    if rule is None or not rule.separable:
        return f"format {format.name} does not round activations to elements with scales of their own"
    if rule.element != format.element:
        return f"format {format.name} has elements {format.element}, and activations {rule.element}"
    level, *more = format.levels
    if more or level.zeros or level.offsets or level.dtype is not torch.float32:
        return f"format {format.name} has more than one float32 scale for a block of elements"
    if format.ordered or format.rotated or format.packing != "plain":
        return f"format {format.name} packs, orders or rotates columns"
    return ""


def _found(name: str) -> tuple[Format, Activations]:
    """Return the format `name` and its rule for activations. Raises ValueError if it is not for these ops."""
    format = find_format(name)
    if problem := why_not_separate(format):
        raise ValueError(problem)
    assert format.activations is not None
    return format, format.activations


def _groups(rule: Activations, columns: int) -> int:
    """Return how many scales a row of x has. Raises ValueError if groups do not divide the columns."""
    if rule.columns and columns % rule.columns:
        raise ValueError(f"{columns} columns are no multiple of the {rule.columns} that share a scale")
    return columns // rule.columns if rule.columns else 1


def _rows_samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    x = torch.randn(5, 256, generator=g).to(dtype)
    return [
        *(Sample((x,), {"format": name}) for name in _NAMES),
        Sample((x, torch.full((1,), 1 / 64)), {"format": _STATIC.name}),
    ]


def _rows_fake(
    x: torch.Tensor, stored: torch.Tensor | None = None, *, format: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return empty results: the op's shape function, also for meta tensors.

    Raises ValueError if the format is not for the op, or does not fit x or `stored`.
    """
    _, rule = _found(format)
    if rule.stored != (stored is not None):
        raise ValueError(f"format {format}: a stored scale is {'missing' if rule.stored else 'not read'}")
    groups = _groups(rule, x.shape[1])
    return (
        x.new_empty(x.shape, dtype=ELEMENTS[rule.element].storage),
        x.new_empty(x.shape[0], groups, dtype=torch.float32),
    )


@define(
    rows=("x",),
    samples=_rows_samples,
    fake=_rows_fake,
    flops=2,  # the largest magnitude, and a division
    fusible=False,  # a kernel of its own, or the reference
    placement=whole,
)
def round_rows(
    x: torch.Tensor, stored: torch.Tensor | None = None, *, format: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x [T, K] as elements [T, K] and scales f32 [T, groups], by the rule for activations of a weight's format.

    A number is its element times its scale. A group is all columns, or as many as the rule says. `stored` f32[1] is
    the scale of all rows, if the rule has a stored scale.
    """
    full = x if x.dtype is torch.float64 else x.float()
    return _found(format)[1].elements(full, stored)


def _samples(g: torch.Generator, dtype: torch.dtype) -> list[Sample]:
    samples = []
    for format in (*map(find_format, _NAMES), _STATIC):
        assert format.activations is not None
        parts = quantize(torch.randn(24, 256, generator=g), named(replace(format, activations=None)))
        stored = torch.full((1,), 1 / 64) if format.activations.stored else None
        rows = format.activations.elements(torch.randn(5, 256, generator=g), stored)
        given = (*rows, parts["weight"], parts["scales"])
        samples.append(Sample(given, {"format": format.name, "dtype": dtype}))
    bias = torch.randn(24, generator=g).to(dtype)
    return [*samples, Sample((*given, bias), {"format": format.name, "dtype": dtype})]


def _flops(x: torch.Tensor, x_scales: torch.Tensor, weight: torch.Tensor, *_: object, **__: object) -> int:
    return 2 * x.shape[0] * weight.numel()


def _fake(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    format: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return an empty result: the op's shape function, also for meta tensors.

    Raises ValueError if the format is not for the op, if tensors do not fit it, or if the bias does not have one number
    for each row of the weight.
    """
    found, rule = _found(format)
    given = {"weight": weight, "scales": scales}
    for part, wanted in found.types((weight.shape[0], x.shape[1]), torch.float32).items():
        value = given.get(part)
        if value is not None and (value.dtype != wanted.dtype or tuple(value.shape) != wanted.shape):
            raise ValueError(f"format {format} has {part} {wanted}, and {list(value.shape)} are given")
    wanted_scales = (x.shape[0], _groups(rule, x.shape[1]))
    if x.dtype != ELEMENTS[rule.element].storage or tuple(x_scales.shape) != wanted_scales:
        raise ValueError(f"format {format} has x scales {list(wanted_scales)}, and {list(x_scales.shape)} are given")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"format {format} has a bias {list(weight.shape[:1])}, and {list(bias.shape)} are given")
    return x.new_empty(x.shape[0], weight.shape[0], dtype=dtype)


@define(
    rows=("x", "x_scales"),
    samples=_samples,
    fake=_fake,
    flops=_flops,
    multiplies=True,
    fusible=False,  # a library computes it, or the reference
    placement=whole,
)
def rounded_linear(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    format: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return `x @ w.T + bias` [T, N] in `dtype`, for rounded rows x [T, K] and a weight w [N, K] in a format.

    `x` and `x_scales` are what `round_rows` returns for the format. `weight` and `scales` are the format's parts, and
    bias is [N]. It computes in float32 (for float64, in float64) and rounds once.
    """
    found, _ = _found(format)
    full = torch.float64 if dtype is torch.float64 else torch.float32
    rows = (x.to(full).unflatten(-1, (x_scales.shape[1], -1)) * x_scales.to(full)[..., None]).flatten(-2)
    matrix = dequantize({"weight": weight, "scales": scales}, found, full)
    return F.linear(rows, matrix, None if bias is None else bias.to(full)).to(dtype)
