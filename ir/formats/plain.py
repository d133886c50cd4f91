"""The plain format: row-major, with the numbers of the checkpoint."""

from ingot.ir.formats.format import Format, register_format

PLAIN = register_format(Format("plain"))
