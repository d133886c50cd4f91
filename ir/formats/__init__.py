"""Storage formats of weights, by name, and the packings that order their elements in memory.

Importing a module of this folder registers its formats, and this package imports all of them. A new format is a new
file here, or a module of another package (`ingot.ir.plugins`).
"""

import importlib
import pkgutil

from ingot.ir.formats.format import (
    ELEMENTS,
    FORMATS,
    Format,
    Scales,
    dequantize,
    find_format,
    quantize,
    register_format,
)
from ingot.ir.formats.packing import PACKINGS, Packing, register_packing

__all__ = [
    "ELEMENTS",
    "FORMATS",
    "PACKINGS",
    "Format",
    "Packing",
    "Scales",
    "dequantize",
    "find_format",
    "quantize",
    "register_format",
    "register_packing",
]

for _module in sorted(module.name for module in pkgutil.iter_modules(__path__)):
    importlib.import_module(f"{__name__}.{_module}")
