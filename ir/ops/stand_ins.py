"""The numbers that stand for symbols such as "T" while the shape function of an op infers a type."""

from collections.abc import Mapping

from ingot.ir.types import DIM_MEANINGS

# Primes near a million: larger than hidden sizes, and small enough that the product of sizes stays far below 2**63.
_PRIMES = (1000003, 1000033, 1000037, 1000039, 1000081, 1000099, 1000117, 1000121, 1000133, 1000151)
STAND_INS: Mapping[str, int] = dict(zip(DIM_MEANINGS, _PRIMES, strict=True))


def rows_of_part(rows: int, parts: int) -> int:
    """Return the rows of a rank if `parts` ranks split `rows` rows: all have equally many, rounded up."""
    return -(-rows // parts)


def part_of_symbol(rows: int, parts: int) -> int:
    """Return `rows_of_part` for a shape function: the number that stands for "T" becomes that of "T_tp"."""
    return STAND_INS["T_tp"] if rows == STAND_INS["T"] else rows_of_part(rows, parts)
