"""The format of a weight that is stored as the checkpoint has it: row by row, each number as it is."""

from ingot.ir.formats.format import Format, register_format

PLAIN = register_format(Format("plain"))
