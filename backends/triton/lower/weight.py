"""The weight of a product, by what it is stored in."""

from dataclasses import dataclass

from ingot.backends.triton.lower.refused import Refused
from ingot.backends.triton.schedule import Value

# The packing of a matrix as `ingot.linear` has it: row by row, each element as it is.
PLAIN = "plain"


@dataclass(frozen=True)
class Weight:
    """A weight [rows, depth] as a product is given it: the tensors that it is stored in, and by which packing."""

    parts: tuple[Value, ...]
    rows: int
    depth: int
    packing: str = PLAIN

    @property
    def row_bytes(self) -> int:
        """Of a row, without what it is scaled by: those of the first part, by the number of rows."""
        elements = self.parts[0].type
        count = elements.dtype.itemsize
        for size in elements.shape:
            assert isinstance(size, int), f"a weight of {elements}"
            count *= size
        return -(-count // self.rows)

    @property
    def argument(self) -> Value | tuple[Value, ...]:
        """What kernels are given as `weight`."""
        return self.parts[0] if len(self.parts) == 1 else self.parts


def plain_weight(value: Value) -> Weight:
    """The weight of `ingot.linear`, [rows, depth] as it stands. Raises Refused where its sizes are no numbers."""
    rows, depth = value.type.shape
    if isinstance(rows, str) or isinstance(depth, str):
        raise Refused(f"a weight of {value.type}")
    return Weight((value,), rows, depth)
