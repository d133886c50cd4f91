"""Linears with quantized weights on a CPU: which formats the C++ kernels read, and the call of a kernel."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from ingot.backends.cpu.calls.kernels import INT, POINTER, Kernels
from ingot.ir.formats import Format, find_format

# In the order of the enums in kernels/quant.h.
ELEMENTS = ("i8", "u8", "i4", "u4", "f4e2m1", "iq4nl")
SCALES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e8m0fnu)
# The packing of each element type.
_PACKED = {element: "plain" if element in ("i8", "u8") else "low_first" for element in ELEMENTS}
# The columns of a row that the kernels read at once, a register of 64 bytes, by packing.
_CHUNK = {"plain": 64, "low_first": 128}
# Groups shorter than this do not fill the lanes whose products are added in a register.
_LEAST_GROUP = 16


def unsupported(format: Format) -> str | None:
    """Return why the C++ kernels do not read weights in `format`; None if they do."""
    level = format.levels[0] if len(format.levels) == 1 else None
    if format.element not in ELEMENTS or format.packing != _PACKED[format.element]:
        return f"no kernel for elements {format.element} in the order '{format.packing}'"
    if format.activations is not None:
        return "no kernel rounds activations"
    if format.rotated:
        return "no kernel rotates the input or the result"
    if level is None or level.offsets or level.dtype not in SCALES or format.ordered:
        return f"no kernel for the scales, offsets or order of the format '{format.name}'"
    if level.rows > 1:
        return f"no kernel for scales that {level.rows} rows share"
    chunk = _CHUNK[format.packing]
    if level.columns and (level.columns < _LEAST_GROUP or (level.columns % chunk and chunk % level.columns)):
        return f"no kernel for groups of {level.columns} columns"
    return None


@cache
def _constants(format: str) -> tuple[int, Any]:
    """Return the columns of a tile of a format, and what the kernels take instead of a format: an array of integers.

    The integers are the columns of a group (0 for all), the places of the element type in `ELEMENTS` and of the dtype
    of scales in `SCALES`, and whether all rows share their scales.
    """
    found = find_format(format)
    level = found.levels[0]
    numbers = level.columns, ELEMENTS.index(found.element), SCALES.index(level.dtype), int(level.rows == 0)
    return found.layout.tile[1], (INT * len(numbers))(*numbers)


def quant_ops(kernels: Kernels) -> dict[str, Callable[..., torch.Tensor]]:
    """Return the functions of linears with quantized weights by op name, "ingot.quant_linear" alone."""
    functions = kernels.by_dtype("quant_linear", *[POINTER] * 2, INT, *[POINTER] * 4, *[INT] * 3, POINTER)

    def quant_linear(
        x: torch.Tensor,
        weight: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        *,
        format: str,
    ) -> torch.Tensor:
        columns, constants = _constants(format)
        tokens, (n, tiles) = x.shape[0], weight.shape
        out = x.new_empty((tokens, n))
        functions[x.dtype](
            out.data_ptr(),
            x.data_ptr(),
            x.stride(0),
            weight.data_ptr(),
            scales.data_ptr(),
            None if zeros is None else zeros.data_ptr(),
            None if bias is None else bias.data_ptr(),
            tokens,
            n,
            tiles * columns,
            constants,
        )
        return out

    return {"ingot.quant_linear": quant_linear}
