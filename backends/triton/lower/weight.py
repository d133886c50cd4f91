"""The weight of a matmul: the tensors that store it, and its packing (the order of its stored elements)."""

from dataclasses import dataclass

from ingot.backends.triton.lower.refused import Refused
from ingot.backends.triton.schedule import Value

# The packing of a weight of the op `linear`: a row-major matrix of unpacked elements.
PLAIN = "plain"


@dataclass(frozen=True)
class Weight:
    """A weight [rows, depth] of a matmul.

    `parts` are the tensors that store it, first its elements, then scales if it has them. `packing` names the order of
    the stored elements.
    """

    parts: tuple[Value, ...]
    rows: int
    depth: int
    packing: str = PLAIN

    @property
    def row_bytes(self) -> int:
        """Return the bytes of a stored row, without scales: the first tensor's bytes divided by the number of rows."""
        elements = self.parts[0].type
        count = elements.dtype.itemsize
        for size in elements.shape:
            assert isinstance(size, int), f"a weight of {elements}"
            count *= size
        return -(-count // self.rows)

    @property
    def argument(self) -> Value | tuple[Value, ...]:
        """Return the argument `weight` of the matmul kernels: the one tensor of the weight, or a tuple of several."""
        return self.parts[0] if len(self.parts) == 1 else self.parts


def plain_weight(value: Value) -> Weight:
    """Return the weight [rows, depth] of a matmul that is stored as one unpacked tensor, the operand of `linear`.

    Raises Refused if a size is a symbol.
    """
    rows, depth = value.type.shape
    if isinstance(rows, str) or isinstance(depth, str):
        raise Refused(f"a weight of {value.type}")
    return Weight((value,), rows, depth)
