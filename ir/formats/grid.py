"""The numbers that a quantized weight can have once its scales are chosen, for methods that choose among them."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ingot.ir.formats.elements import ELEMENTS
from ingot.ir.formats.format import Format, Scales, outer_of_blocks, quantize

# The factors of the range that `Grid.fitted` tries. AutoAWQ searches down to half the range in steps of 5 %.
SHRINKS = tuple(1 - step / 20 for step in range(1, 11))
_SHIFTS = ("zeros", "offsets")


@dataclass(frozen=True)
class Grid:
    """The numbers that each element of a weight [N, K] can have: `(element - zero) * step + offset`.

    parts    the tensors that store scales, zero points and offsets, by part name
    step     float32 [N, K]: the scale of each element, over all levels
    zero     float32 [N, K]: the zero point of each element; None if the format has none
    offset   float32 [N, K]: the offset of each element; None if the format has none
    """

    format: Format
    parts: Mapping[str, torch.Tensor]
    step: torch.Tensor
    zero: torch.Tensor | None
    offset: torch.Tensor | None

    @staticmethod
    def of(matrix: torch.Tensor, format: Format) -> "Grid":
        """Return the grid that `quantize` chooses for a matrix, float32 [N, K]."""
        parts = {name: part for name, part in quantize(matrix, format).items() if name != "weight"}
        return Grid.with_parts(parts, format, (matrix.shape[0], matrix.shape[1]))

    @staticmethod
    def with_parts(parts: Mapping[str, torch.Tensor], format: Format, shape: tuple[int, int]) -> "Grid":
        """Return the grid of a matrix of `shape` whose scales, zero points and offsets are stored in `parts`."""
        level, scales = format.levels[0], parts["scales"].float()
        if "outer" in parts:
            scales = scales * outer_of_blocks(parts["outer"].float(), format, scales)
        zero, offset = (_spread(parts[part].float(), level, shape) if part in parts else None for part in _SHIFTS)
        return Grid(format, dict(parts), _spread(scales, level, shape), zero, offset)

    @staticmethod
    def fitted(matrix: torch.Tensor, format: Format, importance: torch.Tensor) -> "Grid":
        """Return the grid with the scales, among some smaller ones, that round `matrix` with the least error.

        `matrix` is float32 [N, K]. `importance` [K] weighs the squared error of each column. The largest numbers of a
        block are cut off if that makes the others enough more precise. Scales of two levels, and those that are powers
        of two, stay as `quantize` chooses them.
        """
        found = Grid.of(matrix, format)
        level, shape = format.levels[0], (matrix.shape[0], matrix.shape[1])
        if len(format.levels) != 1 or level.dtype is torch.float8_e8m0fnu:
            return found
        least = _block_sums((found.nearest(matrix) - matrix).square() * importance, level)
        for shrink in SHRINKS:
            tried = Grid.of(matrix * shrink, format)
            error = _block_sums((tried.nearest(matrix) - matrix).square() * importance, level)
            better = error < least
            least = torch.where(better, error, least)
            parts = {part: torch.where(better, tried.parts[part], found.parts[part]) for part in found.parts}
            found = Grid.with_parts(parts, format, shape)
        return found

    def nearest(self, numbers: torch.Tensor, columns: slice | int = slice(None)) -> torch.Tensor:
        """Return the numbers of the grid that are nearest to `numbers`. `columns` are the columns that these have."""
        elements = ELEMENTS[self.format.element].nearest(self._scaled(numbers, columns))
        found = (elements if self.zero is None else elements - self.zero[:, columns]) * self.step[:, columns]
        return found if self.offset is None else found + self.offset[:, columns]

    def stored(self, numbers: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the tensors that store a matrix [N, K] whose numbers are on the grid, by part name."""
        codes = ELEMENTS[self.format.element].encode(self._scaled(numbers, slice(None)))
        return {"weight": self.format.layout.pack(codes).contiguous(), **self.parts}

    def _scaled(self, numbers: torch.Tensor, columns: slice | int) -> torch.Tensor:
        moved = numbers if self.offset is None else numbers - self.offset[:, columns]
        scaled = moved / self.step[:, columns]
        return scaled if self.zero is None else scaled + self.zero[:, columns]


def _spread(blocks: torch.Tensor, level: Scales, shape: tuple[int, int]) -> torch.Tensor:
    """Return the number of each element's block, as a matrix of `shape`. The last blocks may be smaller."""
    rows, columns = level.rows or shape[0], level.columns or shape[1]
    return blocks.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: shape[0], : shape[1]]


def _block_sums(matrix: torch.Tensor, level: Scales) -> torch.Tensor:
    """Return the sum of each block's elements."""
    rows, columns = level.rows or matrix.shape[0], level.columns or matrix.shape[1]
    down, along = level.grid((matrix.shape[0], matrix.shape[1]))
    full = F.pad(matrix, (0, along * columns - matrix.shape[1], 0, down * rows - matrix.shape[0]))
    return full.reshape(down, rows, along, columns).sum((1, 3))
