"""Tile sizes for attention of few tokens: those of the measured problem that is most like it."""

from dataclasses import replace

from ingot.backends.triton.lower.attention_problem import DecodeProblem
from ingot.backends.triton.lower.attention_tiles import DECODE_TILES, DecodeTiles
from ingot.ir.tuning import Source

# The smallest operand of a tensor-core product in Triton has 16 elements along each side.
_LEAST_KEYS = 16


def known_tiles(problem: DecodeProblem) -> tuple[DecodeTiles, Source]:
    """By the most tokens of a step and the bytes of a head; wider heads than any measured get fewer keys."""
    by_bytes = DECODE_TILES[next((tokens for tokens in DECODE_TILES if problem.tokens <= tokens), max(DECODE_TILES))]
    found = by_bytes.get(problem.row_bytes)
    if found is not None and problem.append:
        return found, "table"
    measured = max((one for one in by_bytes if one <= problem.row_bytes), default=min(by_bytes))
    keys = by_bytes[measured].keys
    while keys > _LEAST_KEYS and keys * problem.row_bytes > by_bytes[measured].keys * measured:
        keys //= 2
    return replace(by_bytes[measured], keys=keys), "heuristic"
