"""Compile-time constants of the kernels for quantized weights: each dataclass is one constant of a kernel.

The dataclasses have fields and no properties, as those of attention.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Elements:
    """How a quantized weight [rows, K] is stored, for a kernel.

    element        the element type: "f8e4m3", "i8", "u8", "i4", "u4" or "f4e2m1"
    chunk          0 for elements of a byte. Elements of four bits: the columns of a chunk. Quarter i of a chunk has the
                   columns 4 j + i, which are the four bits from 4 i on of the 16-bit word j.
    words          words of a row: bytes, or words of 16 bits
    offset         the number that is subtracted from an element; 0 with zero points
    assembly       whether elements are converted by instructions of compute capability 9.0
    scale_rows     rows that share a scale; 0: all
    scale_columns  columns that share a scale; 0: all
    scale_stride   scales of a row of blocks
    scale_kind     "float", or "e8m0" if a scale is stored as the exponent of a power of two
    outer_rows     rows that share a scale of the second level, which all columns share; 0: all; -1: no such level
    zeros          whether each scale has a zero point
    x_columns      columns of x that share a scale; 0: all
    x_scales       "none" if x has no scales, "token" if each token has its own, "tensor" for one number
    fold           scales of groups of columns multiply sums if it is -1. Else `quant_tile` multiplies elements by them
                   and by 2**-fold, which is exact, and sums by 2**fold
    """

    element: str
    chunk: int
    words: int
    offset: int
    assembly: bool
    scale_rows: int
    scale_columns: int
    scale_stride: int
    scale_kind: str
    outer_rows: int
    zeros: bool
    x_columns: int
    x_scales: str
    fold: int = -1


@dataclass(frozen=True)
class Rounded:
    """How `prepare_rows` rounds rows of x to an element type.

    element   "f8e4m3" or "i8"; "none": numbers stay as they are
    columns   columns that share a scale; 0: all
    stored    whether the scale is a stored number, the same for all tokens
    high      the largest number of the element type
    bound     the largest magnitude that a scale covers; 0: any
    exponent  where scales are powers of two: the exponent of the power of two in `high`; else -1
    """

    element: str = "none"
    columns: int = 0
    stored: bool = False
    high: float = 0.0
    bound: float = 0.0
    exponent: int = -1


@dataclass(frozen=True)
class ExpertSizes:
    """How many stored elements one expert has of the tensors that store the weights of all experts.

    `weight` counts elements of storage, bytes for elements of four bits. Zero points are as many as `scales`.
    """

    weight: int
    scales: int
    outer: int
