"""Tile sizes for attention of few tokens: those of the measured problem that is most like it, or what fits."""

from dataclasses import replace

from ingot.backends.triton.lower.attention_form_tiles import FormTiles, form_tiles
from ingot.backends.triton.lower.attention_problem import AUTO, DecodeProblem
from ingot.backends.triton.lower.attention_shapes import held_of, tiled
from ingot.backends.triton.lower.attention_tiles import DECODE_TILES, DecodeTiles
from ingot.backends.triton.lower.sizes import LEAST, power_of_two
from ingot.ir.tuning import Source
from ingot.ir.types import DTYPES

# Rows of a tile, the heads of q that read one head of the cache, which a warp holds at most. With 64 of them, as 2 warps
# would have for Falcon 7B's 71 heads, registers spill for sm_90.
_WARP_ROWS = 32
_MEASURED_GROUP = 32  # heads of q for one of the cache, in the problems that were measured


def known_tiles(problem: DecodeProblem, sm: int) -> tuple[DecodeTiles, Source]:
    """By the most tokens of a step, or the most measured, and the bytes of a head; wider heads than any measured get
    fewer keys. Where values are not beside keys of their width, the largest that fit on the compute capability `sm`."""
    if not problem.cache_form.equal:
        fitting = fitting_tiles(problem, sm)
        return DecodeTiles(fitting.keys, fitting.stages, programs=1, warps=fitting.warps, early=0), "heuristic"
    by_bytes = DECODE_TILES[next((tokens for tokens in DECODE_TILES if problem.tokens <= tokens), max(DECODE_TILES))]
    # A cache of eight bits gets the tiles of one in the dtype of q: what is converted takes as many registers.
    row_bytes = problem.dim * DTYPES[problem.dtype].itemsize
    rows = power_of_two(problem.group)
    found = by_bytes.get(row_bytes)
    if found is not None and problem.append and problem.cache_dtype == AUTO and rows <= _MEASURED_GROUP:
        return found, "table"
    measured = max((one for one in by_bytes if one <= row_bytes), default=min(by_bytes))
    keys = by_bytes[measured].keys
    while keys > LEAST and keys * row_bytes > by_bytes[measured].keys * measured:
        keys //= 2
    return enough_warps(problem, replace(by_bytes[measured], keys=keys)), "heuristic"


def enough_warps(problem: DecodeProblem, tiles: DecodeTiles) -> DecodeTiles:
    """The tiles with warps for all heads of q that read one head of the cache."""
    return replace(tiles, warps=max(tiles.warps, power_of_two(problem.group) // _WARP_ROWS))


def fitting_tiles(problem: DecodeProblem, sm: int) -> FormTiles:
    """For a problem that a lowering has taken: one whose groups of heads are cut as they fit."""
    form = tiled(problem.cache_form, problem.kv_heads, problem.group)
    return form_tiles(held_of(form, 1, DTYPES[problem.dtype].itemsize), sm, lambda *_: None, form.block_group)
