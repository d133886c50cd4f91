"""The cublas backend at run time: the torch functions that compute its ops."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.functional import ScalingType, scaled_mm

# Rows of x with scales of blocks are a multiple of 4, so that their scales are whole 16 bytes. cuBLAS refuses others.
_ROWS_ALIGNED = 4


def find_op(target: str) -> Callable[..., Any] | None:
    """Return the torch function that computes an op with cuBLAS, or None if cuBLAS does not compute the op.

    `target` is the op's printed name, such as "ingot.linear".
    """
    return _OPS.get(target)


def _rounded_linear(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    format: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Compute the op `rounded_linear`, whose scales are those of rows, or of blocks of 128 columns.

    With scales of rows, tensor cores add up all columns with some 14 bits. On an H200 that gives an error of 0.2 %
    (4096 columns) to 0.3 % (14336), rounding to bf16 included, where float8 rounds each number by up to 6 %. Sums in
    float32 have 0.17 %, and take 1.1 times as long. With blocks, cuBLAS adds the sums of 128 columns in float32.
    """
    if x_scales.shape[1] == 1:
        columns = scales.reshape(1, -1).expand(1, len(weight)).contiguous()
        by_row = (x_scales, ScalingType.RowWise, columns, ScalingType.RowWise)
        return scaled_mm(x, weight.t(), *by_row, bias=bias, output_dtype=dtype, use_fast_accum=True)
    # cuBLAS reads scales of x with the rows as the last axis, and rows of whole 16 bytes.
    rows, missing = len(x), -len(x) % _ROWS_ALIGNED
    if missing:
        x = F.pad(x.view(torch.uint8), (0, 0, 0, missing)).view(x.dtype)
    by_column = F.pad(x_scales.t(), (0, missing)).contiguous().t()
    by_block = (by_column, ScalingType.BlockWise1x128, scales.t(), ScalingType.BlockWise128x128)
    return scaled_mm(x, weight.t(), *by_block, bias=bias, output_dtype=dtype)[:rows]


# Ops that torch computes with cuBLAS on a GPU. TF32 stays off, which is torch's default.
_OPS: Mapping[str, Callable[..., Any]] = {"ingot.linear": F.linear, "ingot.rounded_linear": _rounded_linear}
