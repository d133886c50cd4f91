"""The format "plain" of weights: row-major, with the numbers of the checkpoint, not quantized."""

from ingot.ir.formats.format import Format
from ingot.ir.formats.names import register_format

PLAIN = register_format(Format("plain"))
