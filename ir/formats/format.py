"""Storage formats of weights: each defines the elements, their scales, and their order in memory.

Recipes and calls of `quant_linear` name formats, so a name never changes its meaning. A new meaning needs a new name.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from ingot.ir.errors import InternalError, OptionError, VerifyError
from ingot.ir.formats.packing import PACKINGS, Packing
from ingot.ir.types import Split, TensorType

# Element types of quantized weights: (smallest, largest value). i8 lacks -128, so that its range is symmetric.
ELEMENTS: Mapping[str, tuple[int, int]] = {"i8": (-127, 127), "u8": (0, 255), "u4": (0, 15)}
# The element type of weights that keep their numbers and dtype.
KEPT = "kept"


@dataclass(frozen=True)
class Scales:
    """How elements of a quantized matrix share scales: there is one scale per block of elements.

    rows     the rows of a block; 0: all rows of the matrix
    columns  the columns of a block; 0: all columns of the matrix
    zeros    whether each scale has a zero point, so that a block's range need not be symmetric
    dtype    the dtype of the scales
    """

    rows: int = 1
    columns: int = 0
    zeros: bool = False
    dtype: torch.dtype = torch.float32

    def grid(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the number of blocks along each axis of a matrix of this shape.

        The elements of a block share one scale.
        """
        return shape[0] // (self.rows or shape[0]), shape[1] // (self.columns or shape[1])


@dataclass(frozen=True)
class Format:
    """A storage format of weight matrices [N, K], such as "int4_g32".

    A number of the weight is `(element - zero) * scale`. Without scales, it is the element.

    element      the type of elements: "i8", "u8", "u4", or "kept" for the checkpoint's numbers and dtype
    levels       one `Scales`, which says how elements share scales; empty without scales
    activations  "float": only weights are quantized
    packing      the order of elements in memory, a key of `PACKINGS`

    A weight is stored in up to three tensors, called parts: "weight" (the packed elements), "scales" and "zeros".
    """

    name: str
    element: str = KEPT
    levels: tuple[Scales, ...] = ()
    activations: str = "float"
    packing: str = "plain"

    @property
    def lossless(self) -> bool:
        """Return whether the format keeps the numbers of a weight unchanged, without quantization."""
        return self.element == KEPT

    @property
    def layout(self) -> Packing:
        return PACKINGS[self.packing]

    @property
    def parts(self) -> tuple[str, ...]:
        """Return the names of the tensors that store a weight: "weight", and for some formats "scales" and "zeros"."""
        return ("weight", *(part for level in self.levels for part in ("scales", "zeros")[: 1 + level.zeros]))

    def storage(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the packed elements. `dtype` is the weight's dtype in the checkpoint."""
        if self.lossless:
            return dtype
        return torch.int8 if self.element == "i8" else torch.uint8

    @property
    def row_by_row(self) -> bool:
        """Return whether quantized matrices can be stacked row by row. They cannot if one scale is for all rows."""
        return all(level.rows for level in self.levels)

    def block(self, part: str) -> tuple[int, int]:
        """Return how many rows and columns of the weight share one entry of the tensor `part`; 0 means all of them.

        `part` is "weight", "scales" or "zeros".
        """
        if part == "weight":
            return self.layout.tile
        (level,) = self.levels
        return level.rows, level.columns

    def granule(self, dim: int) -> int:
        """Return the least number of rows (`dim` 0) or columns (`dim` 1) that must stay together on one rank of a mesh.

        It keeps packed tiles whole, and blocks of elements that share one scale.
        """
        return math.lcm(*(self.block(part)[dim] or 1 for part in self.parts))

    def obstacle(self, shape: tuple[int, ...]) -> str | None:
        """Return why a weight of this shape cannot be stored in this format; None if it can."""
        if len(shape) != 2 or 0 in shape:
            return f"a tensor {list(shape)} is not a matrix"
        tile = "x".join(map(str, self.layout.tile))
        if shape[0] % self.granule(0):
            return f"{shape[0]} rows are no multiple of {self.granule(0)}: tiles are {tile}"
        for level in self.levels:
            if level.columns and shape[1] % level.columns:
                return f"rows of {shape[1]} elements are no multiple of the group of {level.columns}"
        if shape[1] % self.granule(1):
            return f"rows of {shape[1]} elements are no multiple of {self.granule(1)}: tiles are {tile}"
        return None

    def below_group(self, shape: tuple[int, ...]) -> str | None:
        """Return why a weight of this shape is too small for the format; None if it is not.

        It is too small if a row has fewer elements than share one scale.
        """
        group = max((level.columns or 0 for level in self.levels), default=0)
        if len(shape) == 2 and 0 < shape[1] < group:
            return f"rows of {shape[1]} elements are shorter than a group of {group}"
        return None

    def shape_of(self, packed: tuple[int, ...]) -> tuple[int, int]:
        """Return the shape of a weight, from the shape `packed` of its packed elements."""
        rows, columns = self.layout.tile
        return packed[0] * rows, packed[1] * columns

    def split(self, split: Split | None, part: str) -> Split | None:
        """Return how a mesh may split one stored tensor of a weight; None if every rank holds all of it.

        `split` says how the mesh may split the weight before quantization. `part` names the stored tensor: "weight",
        "scales" or "zeros". Scales are split like their elements. Each rank gets whole tiles, and whole blocks of
        elements that share a scale. This can enlarge the unit, which is the run of elements that stays on one rank. If
        it does, units may no longer be repeated on several ranks. Raises VerifyError if a part of a merged weight, such
        as q of q, k and v, ends within a tile or block.
        """
        if split is None or not (size := self.block(part)[split.dim]):
            return None
        unit = math.lcm(split.unit, self.granule(split.dim))
        if torn := [segment for segment in split.segments if segment % size]:
            raise VerifyError(f"{torn[0]} of a merged weight are no multiple of {size}", expected="whole tiles")
        segments = tuple(segment // size for segment in split.segments)
        return replace(split, segments=segments, unit=unit // size, repeat=split.repeat and unit == split.unit)

    def types(self, shape: tuple[int, int], dtype: torch.dtype) -> dict[str, TensorType]:
        """Return the types of the tensors that store a weight of `shape` and `dtype`, by part name.

        The parts are "weight", "scales" and "zeros". The shape must fit the format.
        """
        (rows, columns), inner = self.layout.tile, self.layout.inner
        packed = (shape[0] // rows, shape[1] // columns, *inner)
        found = {"weight": TensorType(self.storage(dtype), packed)}
        for level in self.levels:
            found["scales"] = TensorType(level.dtype, level.grid(shape))
            if level.zeros:
                found["zeros"] = TensorType(torch.uint8, level.grid(shape))
        return found


FORMATS: dict[str, Format] = {}


def register_format(made: Format) -> Format:
    """Register a weight format by its name. Raises InternalError if the name is taken or a field is invalid."""
    problem = None
    if made.name in FORMATS:
        problem = "is defined twice"
    elif made.packing not in PACKINGS:
        problem = f"names the packing '{made.packing}', which is none of {', '.join(PACKINGS)}"
    elif made.element not in (KEPT, *ELEMENTS):
        problem = f"has elements '{made.element}', which are none of {', '.join((KEPT, *ELEMENTS))}"
    elif len(made.levels) != (not made.lossless):
        problem = f"has {len(made.levels)} levels of scales for elements '{made.element}'"
    elif made.activations != "float":
        problem = f"has activations '{made.activations}', which are none but float"
    if problem:
        raise InternalError(f"the format '{made.name}' {problem}")
    FORMATS[made.name] = made
    return made


def find_format(name: str) -> Format:
    """Return the weight format with this name. Raises OptionError if it is unknown."""
    if name not in FORMATS:
        raise OptionError(f"unknown weight format '{name}'", expected=", ".join(FORMATS))
    return FORMATS[name]


def quantize(tensor: torch.Tensor, format: Format) -> dict[str, torch.Tensor]:
    """Store a weight [N, K] in `format`, and return its tensors by name: "weight", "scales" and "zeros".

    Formats without scales or zeros lack these tensors. Each value changes by at most half its scale. A lossless format
    only reorders values. Raises ValueError for a shape or values that the format cannot store.
    """
    if problem := format.obstacle(tuple(tensor.shape)):
        raise ValueError(problem)
    if format.lossless:
        return {"weight": format.layout.pack(tensor).contiguous()}
    (level,) = format.levels
    blocks = _blocks(tensor.to(torch.promote_types(tensor.dtype, torch.float32)), level)
    low, high = ELEMENTS[format.element]
    if level.zeros:
        # Every block can represent zero exactly, for padding and pruned weights.
        least, most = blocks.amin(-1, keepdim=True).clamp(max=0), blocks.amax(-1, keepdim=True).clamp(min=0)
        spread = (most - least) / (high - low)
    else:
        least, spread = None, blocks.abs().amax(-1, keepdim=True) / high
    # A block of zeros has no scale; the smallest normal number avoids a division by zero.
    scales = spread.clamp(min=torch.finfo(level.dtype).tiny).to(level.dtype)
    if not bool(scales.isfinite().all()):
        raise ValueError("the weight holds NaN, infinities, or values too large for a scale")
    step = scales.to(blocks.dtype)
    zeros = torch.zeros_like(step) if least is None else (low - least / step).round().clamp(low, high)
    elements = (blocks / step + zeros).round().clamp(low, high).to(format.storage(tensor.dtype))
    shape = tensor.shape[0], tensor.shape[1]
    parts = {"weight": format.layout.pack(_matrix(elements, shape, level)).contiguous(), "scales": scales.squeeze(-1)}
    return {**parts, "zeros": zeros.to(torch.uint8).squeeze(-1)} if level.zeros else parts


def dequantize(
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    zeros: torch.Tensor | None,
    format: Format,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return the weight [N, K] that `weight`, `scales` and `zeros` store in `format`. It is computed in `dtype`.

    Without scales, the result is the stored elements in their dtype.
    """
    elements = format.layout.unpack(weight)
    if scales is None:
        return elements
    (level,) = format.levels
    blocks = _blocks(elements, level).to(dtype)
    if zeros is not None:
        blocks = blocks - zeros.to(dtype).unsqueeze(-1)
    return _matrix(blocks * scales.to(dtype).unsqueeze(-1), (elements.shape[0], elements.shape[1]), level)


def _blocks(matrix: torch.Tensor, level: Scales) -> torch.Tensor:
    """Reshape a matrix [N, K] to [blocks of rows, blocks of columns, elements of a block].

    The elements of a block share one scale.
    """
    down, along = level.grid((matrix.shape[0], matrix.shape[1]))
    tiles = matrix.reshape(down, matrix.shape[0] // down, along, matrix.shape[1] // along)
    return tiles.transpose(1, 2).flatten(2)


def _matrix(blocks: torch.Tensor, shape: tuple[int, int], level: Scales) -> torch.Tensor:
    """Return the matrix of `shape` from its blocks: the inverse of `_blocks`."""
    down, along = level.grid(shape)
    return blocks.reshape(down, along, shape[0] // down, shape[1] // along).transpose(1, 2).reshape(shape)
