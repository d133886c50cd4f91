"""Quantization schemes: frozen named values that say how a matrix is stored in few bits, and what the bits mean.

A scheme's name stands in recipes and in calls of `quant_linear`, so it never changes its meaning: another meaning is
another name.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from ingot.ir.errors import OptionError
from ingot.ir.types import Split, TensorType

# Element types of quantized weights: smallest and largest value. -128 is left out, so that a range is symmetric.
ELEMENTS: Mapping[str, tuple[int, int]] = {"i8": (-127, 127), "u8": (0, 255), "u4": (0, 15)}


@dataclass(frozen=True)
class Scheme:
    """How a weight [N, K] is quantized: `x = (element - zero) * scale`, rounded to nearest.

    `element` is a key of ELEMENTS. `scales` says what shares a scale: the "tensor", an output "channel" (a row), or
    `group` consecutive elements of a row. `zeros`: each scale has a zero point, by which the range need not be
    symmetric. `activations` "float": they stay as they are, only weights are quantized. `packing` is "plain", one
    element a byte, or "low_first", two in a byte, element 2i in the low four bits and 2i + 1 in the high ones.
    """

    name: str
    element: str
    scales: str
    group: int = 0
    zeros: bool = False
    scale_dtype: torch.dtype = torch.float32
    activations: str = "float"
    packing: str = "plain"

    @property
    def parts(self) -> tuple[str, ...]:
        """What a quantized weight consists of."""
        return ("weight", "scales", "zeros") if self.zeros else ("weight", "scales")

    @property
    def storage(self) -> torch.dtype:
        return torch.int8 if self.element == "i8" else torch.uint8

    @property
    def per_byte(self) -> int:
        return 2 if self.packing == "low_first" else 1

    @property
    def row_by_row(self) -> bool:
        """Each output channel is quantized by itself, so that matrices may be put one above the other."""
        return self.scales != "tensor"

    def obstacle(self, shape: tuple[int, ...]) -> str | None:
        """Why a weight of this shape cannot be quantized so; None when it can."""
        if len(shape) != 2 or 0 in shape:
            return f"a tensor {list(shape)} is no matrix"
        if self.group and shape[1] % self.group:
            return f"rows of {shape[1]} elements are no multiple of the group of {self.group}"
        return None

    def split(self, split: Split | None, part: str) -> Split | None:
        """How a mesh splits a part, given how it would split the weight: scales go with what they scale.

        Each rank has whole groups and whole bytes.
        """
        if split is None or (part != "weight" and not self._scaled_along(split.dim)):
            return None
        if split.dim == 0:
            return split
        whole = math.lcm(split.unit, self.group or 1, self.per_byte)
        return replace(split, unit=whole // (self.per_byte if part == "weight" else self.group))

    def _scaled_along(self, dim: int) -> bool:
        """Whether there are several scales along `dim` of the weight."""
        return self.row_by_row if dim == 0 else bool(self.group)

    def types(self, shape: tuple[int, int]) -> dict[str, TensorType]:
        """The types of the parts of a weight of `shape`, which the scheme fits."""
        rows, inner = shape
        columns = inner // self.group if self.group else 1
        scales = (1, 1) if self.scales == "tensor" else (rows, columns)
        found = {
            "weight": TensorType(self.storage, (rows, inner // self.per_byte)),
            "scales": TensorType(self.scale_dtype, scales),
        }
        return {**found, "zeros": TensorType(torch.uint8, scales)} if self.zeros else found


# The names are the field's: bits of the weight, and g with the size of a group. Groups of 32, 64 and 128 are what GPTQ,
# AWQ and their kernels use. Scales are float32: a float16 one of small weights would be subnormal and lose bits.
GROUPS = (32, 64, 128)
SCHEMES: Mapping[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme("int8", "i8", "channel"),
        Scheme("int8_tensor", "i8", "tensor"),
        *(Scheme(f"int8_g{size}", "u8", "group", size, zeros=True) for size in GROUPS),
        *(Scheme(f"int4_g{size}", "u4", "group", size, zeros=True, packing="low_first") for size in GROUPS),
    )
}


def find_scheme(name: str) -> Scheme:
    """The scheme `name`. Raises OptionError for an unknown one."""
    if name not in SCHEMES:
        raise OptionError(f"unknown quantization scheme '{name}'", expected=", ".join(SCHEMES))
    return SCHEMES[name]


def quantize(tensor: torch.Tensor, scheme: Scheme) -> dict[str, torch.Tensor]:
    """The parts of a weight [N, K], by name; types as `Scheme.types` says. Raises ValueError for what has none.

    A value is off by at most half a step, its scale; at the ends of a range with a zero point too, since rounding that
    moves the range by up to half a step.
    """
    if problem := scheme.obstacle(tuple(tensor.shape)):
        raise ValueError(problem)
    full = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    groups = full.reshape(1, 1, -1) if scheme.scales == "tensor" else _grouped(full, scheme)
    low, high = ELEMENTS[scheme.element]
    if scheme.zeros:
        # Zero is among the values of every group, as padding and pruned weights want it.
        least, most = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
        spread = (most - least) / (high - low)
    else:
        least, spread = None, groups.abs().amax(-1, keepdim=True) / high
    # A group of zeros has no scale of its own; the smallest normal number avoids dividing by zero.
    scales = spread.clamp(min=torch.finfo(scheme.scale_dtype).tiny).to(scheme.scale_dtype)
    if not bool(scales.isfinite().all()):
        raise ValueError("the weight holds NaN, infinities, or values too large for a scale")
    step = scales.to(full.dtype)
    zeros = torch.zeros_like(step) if least is None else (low - least / step).round().clamp(low, high)
    elements = (groups / step + zeros).round().clamp(low, high).to(scheme.storage).reshape(tensor.shape)
    parts = {"weight": _packed(elements, scheme), "scales": scales.squeeze(-1)}
    return {**parts, "zeros": zeros.to(torch.uint8).squeeze(-1)} if scheme.zeros else parts


def dequantize(
    weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    scheme: Scheme,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The weight [N, K] that the parts stand for, computed in `dtype`."""
    elements = _unpacked(weight, scheme)
    groups = _grouped(elements, scheme).to(dtype)
    if zeros is not None:
        groups = groups - zeros.to(dtype).unsqueeze(-1)
    return (groups * scales.to(dtype).unsqueeze(-1)).reshape(elements.shape)


def _grouped(matrix: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """[N, K] as [N, groups of a row, elements of a group]."""
    return matrix.reshape(matrix.shape[0], -1, scheme.group or matrix.shape[1])


def _packed(elements: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    if scheme.per_byte == 1:
        return elements
    return elements[:, 0::2] | (elements[:, 1::2] << 4)


def _unpacked(weight: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    if scheme.per_byte == 1:
        return weight
    return torch.stack((weight & 15, weight >> 4), -1).flatten(-2)
