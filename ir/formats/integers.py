"""The formats of weights that are quantized to eight-bit or four-bit integers."""

from ingot.ir.formats.activations import Activations
from ingot.ir.formats.format import Format, Scales
from ingot.ir.formats.names import register_alias, register_format

GROUPS = (32, 64, 128)

register_format(Format("int8", "i8", (Scales(),)))
register_alias("int8_w8a16", "int8")
register_format(Format("int8_w8a8", "i8", (Scales(),), Activations("i8")))
register_format(Format("int8_tensor", "i8", (Scales(rows=0),)))
for _size in GROUPS:
    register_format(Format(f"int8_g{_size}", "u8", (Scales(columns=_size, zeros=True),)))
for _size in GROUPS:
    register_format(Format(f"int4_g{_size}", "i4", (Scales(columns=_size),), packing="low_first"))
    register_format(Format(f"int4_g{_size}_asym", "u4", (Scales(columns=_size, zeros=True),), packing="low_first"))
