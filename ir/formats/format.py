"""Storage formats of weights: each defines the elements, their scales, and their order in memory.

Recipes and calls of `quant_linear` name formats, so a name never changes its meaning. A new meaning needs a new name.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F

from ingot.ir.errors import VerifyError
from ingot.ir.formats.activations import Activations
from ingot.ir.formats.elements import ELEMENTS, SCALE_DTYPES, round_scale
from ingot.ir.formats.packing import PACKINGS, Packing
from ingot.ir.formats.rotation import rotated
from ingot.ir.types import Split, TensorType

# The element type of weights that keep their numbers and dtype.
KEPT = "kept"
# The tensors that store a weight, in the order in which recipes and calls pass them.
PARTS = ("weight", "scales", "zeros", "offsets", "outer", "order", "input_scale", "rotation_in", "rotation_out")
# The smallest scale of a dtype, where that is not the smallest normal float32.
_LEAST = {torch.float16: 2.0**-24, torch.float8_e4m3fn: 2.0**-9, torch.float8_e8m0fnu: 2.0**-127}
# The parts that belong to the input or the result of a linear. Linears that read one value can share them.
SHARED_PARTS = frozenset({"order", "input_scale", "rotation_in", "rotation_out"})

# Elements of a weight that are quantized at once on a CPU. Each step makes a tensor of them. If these are small, their
# memory is reused, and larger ones get new pages from the system. Measured for int4_g128 on two cores, in MB/s of bf16:
# 377 for matrices of 3 million elements at once, 902 for 2^19, and 469 for 2^17, for which torch's threads wait.
_ELEMENTS_AT_ONCE = 1 << 19


@dataclass(frozen=True)
class Scales:
    """How elements of a quantized matrix share scales: there is one scale per block of elements.

    rows      the rows of a block; 0: all rows of the matrix
    columns   the columns of a block; 0: all columns of the matrix
    zeros     whether each scale has a zero point, so that a block's range need not be symmetric
    dtype     the dtype of the scales
    offsets   whether each scale has an offset, a float32 that is added after scaling
    """

    rows: int = 1
    columns: int = 0
    zeros: bool = False
    dtype: torch.dtype = torch.float32
    offsets: bool = False

    def grid(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the number of blocks along each axis of a matrix of this shape.

        The elements of a block share one scale. The last block of an axis may be smaller than the others.
        """
        return -(-shape[0] // (self.rows or shape[0])), -(-shape[1] // (self.columns or shape[1]))

    @property
    def square(self) -> bool:
        """Return whether blocks have several rows and columns. The last ones of such blocks may be smaller."""
        return self.rows > 1 and self.columns > 1


@dataclass(frozen=True)
class Format:
    """A storage format of weight matrices [N, K], such as "int4_g32".

    A number of the weight is `(element - zero) * scale + offset`, and `scale` is the scales of all levels
    multiplied. Without scales, it is the element.

    element       the type of elements, a key of `ELEMENTS`, or "kept" for the checkpoint's numbers and dtype
    levels        one `Scales`, which says how elements share scales; with a second one, a further scale multiplies
                  them, such as one for the whole weight; empty without scales
    activations   the rule by which a linear rounds its input; None: not at all
    packing       the order of elements in memory, a key of `PACKINGS`
    ordered       whether the columns are stored in another order, so that columns of one group are neighbours (GPTQ's
                  act-order)
    rotated_in    the size of the blocks in which a linear rotates its input, before it rounds and multiplies it; 0: not
    rotated_out   the size of the blocks in which it rotates its result, before it adds the bias; 0: not

    A weight is stored in up to nine tensors, called parts:

    weight        the packed elements
    scales        the scales of the first level
    zeros         its zero points, as u8
    offsets       its offsets, as f32
    outer         the scales of the second level
    order         i32[K]: the column of the weight that each stored column is
    input_scale   f32[1]: the number that the rule of activations uses
    rotation_in   f32[G, G]: the matrix by which each block of the input is multiplied
    rotation_out  f32[H, H]: the matrix by which each block of the result is multiplied

    With rotations, the stored numbers are those of a rotated weight S. The weight that they stand for includes the
    matrices: for block-diagonal matrices R and U, `x @ R @ S.T @ U` is `x @ w.T` with `w = U.T @ S @ R.T`.
    """

    name: str
    element: str = KEPT
    levels: tuple[Scales, ...] = ()
    activations: Activations | None = None
    packing: str = "plain"
    ordered: bool = False
    rotated_in: int = 0
    rotated_out: int = 0
    parts: tuple[str, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        first = self.levels[0] if self.levels else None
        has = {
            "weight": True,
            "scales": first is not None,
            "zeros": first is not None and first.zeros,
            "offsets": first is not None and first.offsets,
            "outer": len(self.levels) > 1,
            "order": self.ordered,
            "input_scale": self.activations is not None and self.activations.stored,
            "rotation_in": self.rotated_in > 0,
            "rotation_out": self.rotated_out > 0,
        }
        object.__setattr__(self, "parts", tuple(part for part in PARTS if has[part]))

    @property
    def lossless(self) -> bool:
        """Return whether the format changes no result: numbers of weights and activations stay as they are."""
        return self.element == KEPT and self.activations is None and not self.rotated

    @property
    def rotated(self) -> bool:
        """Return whether a linear rotates its input or its result."""
        return self.rotated_in > 0 or self.rotated_out > 0

    @property
    def layout(self) -> Packing:
        return PACKINGS[self.packing]

    def problem(self) -> str | None:
        """Return why the fields do not define a format; None if they do."""
        kept = self.element == KEPT
        rule = self.activations
        if self.packing not in PACKINGS:
            return f"names the packing '{self.packing}', which is none of {', '.join(PACKINGS)}"
        if not kept and self.element not in ELEMENTS:
            return f"has elements '{self.element}', which are none of {', '.join((KEPT, *ELEMENTS))}"
        if len(self.levels) not in ((0,) if kept else (1, 2)):
            return f"has {len(self.levels)} levels of scales for elements '{self.element}'"
        if self.ordered and kept:
            return "reorders the columns of elements without scales"
        if any(level.dtype not in SCALE_DTYPES.values() for level in self.levels):
            return f"has scales of a dtype that is none of {', '.join(SCALE_DTYPES)}"
        if any(level.zeros or level.offsets for level in self.levels[1:]):
            return "has zero points or offsets on its second level of scales"
        if rule is not None and rule.element not in ELEMENTS:
            return f"has activations '{rule.element}', which are none of {', '.join(ELEMENTS)}"
        if rule is not None and not (rule.stored or rule.dynamic):
            return "has static activations without a stored scale"
        return None

    def storage(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the packed elements. `dtype` is the weight's dtype in the checkpoint."""
        return dtype if self.element == KEPT else ELEMENTS[self.element].storage

    @property
    def row_by_row(self) -> bool:
        """Return whether quantized matrices can be stacked row by row. They cannot if one scale is for all rows."""
        return all(level.rows for level in self.levels)

    def block(self, part: str) -> tuple[int, int]:
        """Return how many rows and columns of the weight share one entry of the tensor `part`; 0 means all of them.

        `part` is a name of `PARTS`.
        """
        if part == "weight":
            return self.layout.tile
        if part in SHARED_PARTS:
            return 0, 0
        level = self.levels[1 if part == "outer" else 0]
        return level.rows, level.columns

    def granule(self, dim: int) -> int:
        """Return the least number of rows (`dim` 0) or columns (`dim` 1) that must stay together on one rank of a mesh.

        It keeps packed tiles whole, and blocks of elements that share one scale or are rotated together.
        """
        own = math.lcm(*(self.block(part)[dim] or 1 for part in self.parts))
        own = math.lcm(own, (self.rotated_in if dim else self.rotated_out) or 1)
        return math.lcm(own, self.activations.columns or 1) if dim and self.activations else own

    def obstacle(self, shape: tuple[int, ...]) -> str | None:
        """Return why a weight of this shape cannot be stored in this format; None if it can."""
        if len(shape) != 2 or 0 in shape:
            return f"a tensor {list(shape)} is not a matrix"
        tile = "x".join(map(str, self.layout.tile))
        whole = [level for level in self.levels if not level.square]
        rows, columns = (math.lcm(self.layout.tile[dim], *(_size(level, dim) for level in whole)) for dim in (0, 1))
        if shape[0] % rows:
            return f"{shape[0]} rows are no multiple of {rows}: tiles are {tile}"
        for level in whole:
            if level.columns and shape[1] % level.columns:
                return f"rows of {shape[1]} elements are no multiple of the group of {level.columns}"
        if shape[1] % columns:
            return f"rows of {shape[1]} elements are no multiple of {columns}: tiles are {tile}"
        if self.activations and self.activations.columns and shape[1] % self.activations.columns:
            return (
                f"rows of {shape[1]} elements are no multiple of the activations' group of {self.activations.columns}"
            )
        for size, what, block in ((shape[1], "columns", self.rotated_in), (shape[0], "rows", self.rotated_out)):
            if block and size % block:
                return f"{size} {what} are no multiple of the {block} that are rotated together"
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

    def whole_columns(self) -> bool:
        """Return whether each rank of a mesh must have all columns.

        It must if columns are stored in another order, or if the scale of a token depends on all of them.
        """
        return self.ordered or (self.activations is not None and self.activations.whole_rows)

    def split(self, split: Split | None, part: str) -> Split | None:
        """Return how a mesh may split one stored tensor of a weight; None if every rank holds all of it.

        `split` says how the mesh may split the weight before quantization. `part` names the stored tensor. Scales are
        split like their elements. Each rank gets whole tiles, and whole blocks of elements that share a scale. This can
        enlarge the unit, which is the run of elements that stays on one rank. If it does, units may no longer be
        repeated on several ranks. Raises VerifyError if a part of a merged weight, such as q of q, k and v, ends within
        a tile or block.
        """
        if split is None or (split.dim == 1 and self.whole_columns()) or not (size := self.block(part)[split.dim]):
            return None
        unit = math.lcm(split.unit, self.granule(split.dim))
        if torn := [segment for segment in split.segments if segment % size]:
            raise VerifyError(f"{torn[0]} of a merged weight are no multiple of {size}", expected="whole tiles")
        segments = tuple(segment // size for segment in split.segments)
        return replace(split, segments=segments, unit=unit // size, repeat=split.repeat and unit == split.unit)

    def types(self, shape: tuple[int, int], dtype: torch.dtype) -> dict[str, TensorType]:
        """Return the types of the tensors that store a weight of `shape` and `dtype`, by part name.

        The shape must fit the format.
        """
        (rows, columns), inner = self.layout.tile, self.layout.inner
        packed = (shape[0] // rows, shape[1] // columns, *inner)
        known = {
            "weight": TensorType(self.storage(dtype), packed),
            "order": TensorType(torch.int32, (shape[1],)),
            "input_scale": TensorType(torch.float32, (1,)),
            "rotation_in": TensorType(torch.float32, (self.rotated_in, self.rotated_in)),
            "rotation_out": TensorType(torch.float32, (self.rotated_out, self.rotated_out)),
        }
        for part, level in zip(("scales", "outer"), self.levels, strict=False):
            known[part] = TensorType(level.dtype, level.grid(shape))
        if self.levels:
            grid = self.levels[0].grid(shape)
            known |= {"zeros": TensorType(torch.uint8, grid), "offsets": TensorType(torch.float32, grid)}
        return {part: known[part] for part in self.parts}


def _size(level: Scales, dim: int) -> int:
    return (level.columns if dim else level.rows) or 1


def quantize(tensor: torch.Tensor, format: Format) -> dict[str, torch.Tensor]:
    """Store a weight [N, K] in `format`, and return its tensors by part name.

    Each value becomes the nearest number of its block. A lossless format only reorders values. Columns keep their
    order, and activations have no stored number. Raises ValueError for a shape or values that the format cannot store,
    and for formats whose parts the weight alone does not determine.
    """
    if problem := format.obstacle(tuple(tensor.shape)):
        raise ValueError(problem)
    if missing := sorted(SHARED_PARTS & set(format.parts)):
        raise ValueError(f"the weight alone does not determine {' and '.join(missing)}")
    if format.element == KEPT:
        return {"weight": format.layout.pack(tensor).contiguous()}
    made = [_quantize(rows, format) for rows in tensor.split(_rows_at_once(tensor, format))]
    return made[0] if len(made) == 1 else {part: torch.cat([one[part] for one in made]) for part in format.parts}


def _rows_at_once(tensor: torch.Tensor, format: Format) -> int:
    """Return how many rows of a weight to quantize at once: all of them if they share a scale, or are on a GPU."""
    count, columns = tensor.shape
    if not format.row_by_row or tensor.device.type != "cpu":
        return count
    together = format.granule(0)
    return max(_ELEMENTS_AT_ONCE // columns // together, 1) * together


def _quantize(tensor: torch.Tensor, format: Format) -> dict[str, torch.Tensor]:
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    outer = _outer_scales(wide, format)
    level, element = format.levels[0], ELEMENTS[format.element]
    shape = tensor.shape[0], tensor.shape[1]
    blocks = _blocks(wide if outer is None else _scaled_down(wide, outer, format), level)
    if level.zeros or level.offsets:
        # Every block can represent zero exactly, for padding and pruned weights.
        least, most = blocks.amin(-1, keepdim=True).clamp(max=0), blocks.amax(-1, keepdim=True).clamp(min=0)
        spread = (most - least) / (element.high - element.low)
    else:
        least, spread = None, blocks.abs().amax(-1, keepdim=True) / element.high
    # A second level makes the largest scale the largest of its dtype, up to a rounding.
    if not bool((spread.isfinite() & (spread <= torch.finfo(level.dtype).max * 1.001)).all()):
        raise ValueError("the weight holds NaN, infinities, or values too large for a scale")
    # A block of zeros has no scale; a small number avoids a division by zero.
    normal = torch.finfo(torch.float32).tiny
    step = round_scale(spread.clamp(min=normal), level.dtype, element).clamp(min=_LEAST.get(level.dtype, normal))
    made = {"scales": step.squeeze(-1).to(level.dtype)}
    scaled = blocks / step
    if level.zeros:
        assert least is not None
        zeros = (element.low - least / step).round().clamp(element.low, element.high)
        made["zeros"], scaled = zeros.to(torch.uint8).squeeze(-1), scaled + zeros
    elif level.offsets:
        assert least is not None
        offsets = (least - element.low * step).to(torch.float32)
        made["offsets"], scaled = offsets.squeeze(-1), (blocks - offsets) / step
    packed = format.layout.pack(_matrix(element.encode(scaled), shape, level)).contiguous()
    return {"weight": packed, **made, **({} if outer is None else {"outer": outer})}


def _outer_scales(wide: torch.Tensor, format: Format) -> torch.Tensor | None:
    """Return the scales of the second level, so that the first level's largest scale is the largest of its dtype."""
    if len(format.levels) == 1:
        return None
    level, inner = format.levels[1], format.levels[0].dtype
    most = _blocks(wide, level).abs().amax(-1)
    return (
        (most / (ELEMENTS[format.element].high * torch.finfo(inner).max))
        .clamp(min=torch.finfo(level.dtype).tiny)
        .to(level.dtype)
    )


def _scaled_down(wide: torch.Tensor, outer: torch.Tensor, format: Format) -> torch.Tensor:
    level = format.levels[1]
    return _matrix(_blocks(wide, level) / outer.to(wide.dtype).unsqueeze(-1), (wide.shape[0], wide.shape[1]), level)


def dequantize(parts: Mapping[str, torch.Tensor], format: Format, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the weight [N, K] that `parts` store in `format`. It is computed in `dtype`.

    Without scales and rotations, the result is the stored elements in their dtype. `parts` has the tensors of
    `format.parts` by name; "input_scale" is not used.
    """
    matrix = dequantize_rotated(parts, format, dtype)
    if format.rotated:
        matrix = matrix.to(dtype)
    if format.rotated_in:
        matrix = rotated(matrix, parts["rotation_in"].T)
    if format.rotated_out:
        matrix = rotated(matrix.T, parts["rotation_out"]).T.contiguous()
    return matrix


def dequantize_rotated(
    parts: Mapping[str, torch.Tensor], format: Format, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return the matrix [N, K] by which a linear multiplies its rotated input, before it rotates the result.

    Without rotations, it is the weight. Arguments are as for `dequantize`.
    """
    codes = format.layout.unpack(parts["weight"])
    if format.element == KEPT:
        return codes
    shape, level = (codes.shape[0], codes.shape[1]), format.levels[0]
    blocks = _blocks(ELEMENTS[format.element].decode(codes, dtype), level)
    if "zeros" in format.parts:
        blocks = blocks - parts["zeros"].to(dtype).unsqueeze(-1)
    scales = parts["scales"].to(dtype)
    if "outer" in format.parts:
        scales = scales * outer_of_blocks(parts["outer"].to(dtype), format, scales)
    blocks = blocks * scales.unsqueeze(-1)
    if "offsets" in format.parts:
        blocks = blocks + parts["offsets"].to(dtype).unsqueeze(-1)
    matrix = _matrix(blocks, shape, level)
    return matrix[:, parts["order"].long().argsort()] if format.ordered else matrix


def outer_of_blocks(outer: torch.Tensor, format: Format, scales: torch.Tensor) -> torch.Tensor:
    """Return the scale of the second level for each scale of the first level, or a tensor that broadcasts to it.

    `outer` and `scales` are the tensors of the two levels.
    """
    for dim in (0, 1):
        if 1 < outer.shape[dim] < scales.shape[dim]:
            outer = outer.repeat_interleave(_size(format.levels[1], dim) // _size(format.levels[0], dim), dim)
    return outer


def _blocks(matrix: torch.Tensor, level: Scales) -> torch.Tensor:
    """Reshape a matrix [N, K] to [blocks of rows, blocks of columns, elements of a block].

    The elements of a block share one scale. Smaller blocks at the ends are filled with zeros.
    """
    down, along = level.grid((matrix.shape[0], matrix.shape[1]))
    rows, columns = level.rows or matrix.shape[0], level.columns or matrix.shape[1]
    if (down * rows, along * columns) != tuple(matrix.shape):
        matrix = F.pad(matrix, (0, along * columns - matrix.shape[1], 0, down * rows - matrix.shape[0]))
    return matrix.reshape(down, rows, along, columns).transpose(1, 2).flatten(2)


def _matrix(blocks: torch.Tensor, shape: tuple[int, int], level: Scales) -> torch.Tensor:
    """Return the matrix of `shape` from its blocks: the inverse of `_blocks`."""
    down, along = level.grid(shape)
    rows, columns = level.rows or shape[0], level.columns or shape[1]
    full = blocks.reshape(down, along, rows, columns).transpose(1, 2).reshape(down * rows, along * columns)
    return full[: shape[0], : shape[1]]
