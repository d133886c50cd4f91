"""The weight of a matmul and its packing."""

from dataclasses import dataclass

from ingot.backends.triton.lower.refused import Refused
from ingot.backends.triton.schedule import Value

# The packing of `ingot.linear`: a row-major matrix of unpacked elements.
PLAIN = "plain"


@dataclass(frozen=True)
class Weight:
    """A weight [rows, depth] of a matmul: the tensors that store it, and the packing."""

    parts: tuple[Value, ...]
    rows: int
    depth: int
    packing: str = PLAIN

    @property
    def row_bytes(self) -> int:
        """Return the bytes of a row without its scales: those of the first part divided by the number of rows."""
        elements = self.parts[0].type
        count = elements.dtype.itemsize
        for size in elements.shape:
            assert isinstance(size, int), f"a weight of {elements}"
            count *= size
        return -(-count // self.rows)

    @property
    def argument(self) -> Value | tuple[Value, ...]:
        """Return the kernels' argument `weight`."""
        return self.parts[0] if len(self.parts) == 1 else self.parts


def plain_weight(value: Value) -> Weight:
    """Return the unpacked weight [rows, depth] of `ingot.linear`. Raises Refused if a size is a symbol."""
    rows, depth = value.type.shape
    if isinstance(rows, str) or isinstance(depth, str):
        raise Refused(f"a weight of {value.type}")
    return Weight((value,), rows, depth)
