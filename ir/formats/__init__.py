"""Storage formats of weights, by name, and the packings that order their elements in memory.

Importing a module of this folder registers its formats, and this package imports all of them. A new format is a new
file here, or a module of another package (`ingot.ir.plugins`).
"""

import importlib
import pkgutil

from ingot.ir.formats.activations import Activations
from ingot.ir.formats.elements import ELEMENTS, Element, register_element
from ingot.ir.formats.format import PARTS, SHARED_PARTS, Format, Scales, dequantize, dequantize_rotated, quantize
from ingot.ir.formats.names import FORMATS, find_format, format_of, named, register_format
from ingot.ir.formats.packing import PACKINGS, Packing, register_packing

__all__ = [
    "ELEMENTS",
    "FORMATS",
    "PACKINGS",
    "PARTS",
    "SHARED_PARTS",
    "Activations",
    "Element",
    "Format",
    "Packing",
    "Scales",
    "dequantize",
    "dequantize_rotated",
    "find_format",
    "format_of",
    "named",
    "quantize",
    "register_element",
    "register_format",
    "register_packing",
]

for _module in sorted(module.name for module in pkgutil.iter_modules(__path__)):
    importlib.import_module(f"{__name__}.{_module}")
