"""The weight of a matmul: the tensors that store it, and its packing (the order of its stored elements)."""

from collections.abc import Mapping
from dataclasses import dataclass

from ingot.backends.triton.lower.refused import Refused
from ingot.backends.triton.schedule import Value
from ingot.ir.formats import Format

# The packing of a weight of the op `linear`: a row-major matrix of unpacked elements.
PLAIN = "plain"


@dataclass(frozen=True)
class Weight:
    """A weight [rows, depth] of a matmul, perhaps quantized.

    `parts` are the tensors that store it: the elements, then scales if there are any. `packing` names the order of the
    stored elements. A weight of `quant_linear` has a `format`, whose name is its packing here, and the parts of the
    format in order.
    """

    parts: tuple[Value, ...]
    rows: int
    depth: int
    packing: str = PLAIN
    format: Format | None = None

    @property
    def row_bytes(self) -> int:
        """Return the stored bytes of a row of the weight, without scales."""
        elements = self.parts[0].type
        count = elements.dtype.itemsize
        for size in elements.shape:
            assert isinstance(size, int), f"a weight of {elements}"
            count *= size
        return -(-count // self.rows)

    def part(self, name: str) -> Value | None:
        """Return the part `name` of a weight with a format, such as "scales"; None if the format has no such part."""
        assert self.format is not None, "a weight without a format"
        return dict(zip(self.format.parts, self.parts, strict=True)).get(name)

    @property
    def argument(self) -> Value | tuple[Value, ...]:
        """Return the argument `weight` of the matmul kernels.

        It is a tensor, or a tuple if several tensors store the weight.
        """
        return self.parts[0] if len(self.parts) == 1 else self.parts


def plain_weight(value: Value) -> Weight:
    """Return one unpacked tensor as the weight [rows, depth] of a matmul.

    Raises Refused if a size is the name of a dim.
    """
    rows, depth = value.type.shape
    if isinstance(rows, str) or isinstance(depth, str):
        raise Refused(f"a weight of {value.type}")
    return Weight((value,), rows, depth)


def stored_weight(format: Format, parts: Mapping[str, Value]) -> Weight:
    """Return the tensors `parts`, by part name, as the weight of a matmul. They store it in `format`.

    Raises Refused if a size is the name of a dim.
    """
    elements = parts["weight"]
    first, second = elements.type.shape[:2]
    if isinstance(first, str) or isinstance(second, str):
        raise Refused(f"a weight of {elements.type}")
    rows, depth = format.shape_of((first, second))
    if format.lossless:
        return Weight((elements,), rows, depth, format.packing)
    return Weight(tuple(parts[name] for name in format.parts), rows, depth, format.name, format)
