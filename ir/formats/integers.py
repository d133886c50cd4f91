"""The formats of weights that are quantized to eight-bit or four-bit integers; activations stay floats."""

import torch

from ingot.ir.formats.format import Format, Scales, register_format
from ingot.ir.formats.packing import Packing, register_packing

GROUPS = (32, 64, 128)


def _pack(matrix: torch.Tensor) -> torch.Tensor:
    return matrix[:, 0::2] | (matrix[:, 1::2] << 4)


def _unpack(stored: torch.Tensor) -> torch.Tensor:
    return torch.stack((stored & 15, stored >> 4), -1).flatten(-2)


# Two elements in a byte: element 2i of a row in the low four bits, 2i + 1 in the high ones.
register_packing(Packing("low_first", (1, 2), (), _pack, _unpack))

register_format(Format("int8", "i8", (Scales(),)))
register_format(Format("int8_tensor", "i8", (Scales(rows=0),)))
for _size in GROUPS:
    register_format(Format(f"int8_g{_size}", "u8", (Scales(columns=_size, zeros=True),)))
for _size in GROUPS:
    register_format(Format(f"int4_g{_size}", "u4", (Scales(columns=_size, zeros=True),), packing="low_first"))
