"""Tile sizes for attention of few tokens: those of the measured problem that is most like it, or what fits."""

from dataclasses import replace

from ingot.backends.triton.lower.attention_form_tiles import FormTiles, form_tiles
from ingot.backends.triton.lower.attention_problem import AUTO, DecodeProblem
from ingot.backends.triton.lower.attention_shapes import held_of, tiled
from ingot.backends.triton.lower.attention_tiles import DECODE_TILES, PAGED_TILES, DecodeTiles
from ingot.backends.triton.lower.sizes import LEAST, power_of_two
from ingot.ir.artifact.tuning import Source
from ingot.ir.types import DTYPES

# Rows of a tile, the heads of q that read one head of the cache, which a warp holds at most. For the 71 heads of Falcon
# 7B, 8 warps are faster than 4 on an H200, and with 2 registers spill.
_WARP_ROWS = 16
_MEASURED_GROUP = 32  # heads of q for one of the cache, in the problems that were measured


def known_tiles(problem: DecodeProblem, sm: int) -> tuple[DecodeTiles, Source]:
    """Those that were measured, or by the most tokens of a step and the bytes of a head in a tile: wider heads than any
    measured get fewer keys. Where values are not beside keys of their width, the largest that fit on the compute
    capability `sm`."""
    if not problem.cache_form.equal:
        fitting = fitting_tiles(problem, sm)
        return DecodeTiles(fitting.keys, fitting.stages, programs=1, warps=fitting.warps, early=0), "heuristic"
    if (exact := _measured(problem)) is not None:
        return exact, "table"
    by_bytes = DECODE_TILES[next((tokens for tokens in DECODE_TILES if problem.tokens <= tokens), max(DECODE_TILES))]
    # A head of 96 elements fills a tile of 128.
    row_bytes = power_of_two(problem.dim) * DTYPES[problem.dtype].itemsize
    measured = max((one for one in by_bytes if one <= row_bytes), default=min(by_bytes))
    keys = by_bytes[measured].keys
    while keys > LEAST and keys * row_bytes > by_bytes[measured].keys * measured:
        keys //= 2
    return enough_warps(problem, replace(by_bytes[measured], keys=keys)), "heuristic"


def _measured(problem: DecodeProblem) -> DecodeTiles | None:
    """Tiles that were measured for heads of this size and such a step, if any were."""
    table = DECODE_TILES if problem.append else PAGED_TILES
    by_bytes = next((sizes for tokens, sizes in table.items() if problem.tokens <= tokens), {})
    if problem.cache_dtype != AUTO or power_of_two(problem.group) > _MEASURED_GROUP:
        return None
    return by_bytes.get(problem.dim * DTYPES[problem.dtype].itemsize)


def enough_warps(problem: DecodeProblem, tiles: DecodeTiles) -> DecodeTiles:
    """The tiles with warps for all heads of q that read one head of the cache."""
    return replace(tiles, warps=max(tiles.warps, power_of_two(problem.group) // _WARP_ROWS))


def fitting_tiles(problem: DecodeProblem, sm: int) -> FormTiles:
    """For a problem that a lowering has taken: one whose groups of heads are cut as they fit."""
    form = tiled(problem.cache_form, problem.kv_heads, problem.group)
    return form_tiles(held_of(form, 1, DTYPES[problem.dtype].itemsize), sm, lambda *_: None, form.block_group)
