"""Choose tile sizes for decode attention: those of the most similar measured problem, or the largest that fit."""

from dataclasses import replace

from ingot.backends.triton.lower.attention.form_tiles import FormTiles, form_tiles
from ingot.backends.triton.lower.attention.problem import AUTO, EQUAL, DecodeProblem
from ingot.backends.triton.lower.attention.shapes import tile_widths_of, tiled
from ingot.backends.triton.lower.attention.tiles import DECODE_TILES, EIGHT_BIT_TILES, PAGED_TILES, DecodeTiles
from ingot.backends.triton.lower.sizes import LEAST, power_of_two
from ingot.ir.artifact.tuning import Source
from ingot.ir.types import DTYPES

# Most rows of a tile per warp; rows are the q heads that read one cache head. For the 71 heads of Falcon 7B, 8 warps
# are faster than 4 on an H200, and 2 warps spill registers.
_WARP_ROWS = 16
_MEASURED_GROUP = 32  # most q heads per cache head in the measured problems


def known_tiles(problem: DecodeProblem, sm: int) -> tuple[DecodeTiles, Source]:
    """Return the tile sizes of a decode attention that was not tuned, and their source.

    The source is "table" if the sizes were measured for these sizes and dtypes, else "heuristic". The heuristic uses
    the most tokens of a step and the bytes of a head in a tile. Heads wider than any measured one get fewer keys per
    tile. If keys and values differ in width, it chooses the largest tiles that fit on compute capability `sm`.
    """
    if not problem.cache_form.equal:
        fitting = fitting_tiles(problem, sm)
        return DecodeTiles(fitting.keys, fitting.stages, programs=1, warps=fitting.warps, early=0), "heuristic"
    if (exact := _measured(problem)) is not None:
        return exact, "table"
    if problem.cache_dtype == "i8" and (near := _measured(replace(problem, cache_dtype="f8e4m3"))) is not None:
        return near, "heuristic"
    by_bytes = DECODE_TILES[next((tokens for tokens in DECODE_TILES if problem.tokens <= tokens), max(DECODE_TILES))]
    # A head of 96 elements fills a tile of 128.
    row_bytes = power_of_two(problem.dim) * DTYPES[problem.dtype].itemsize
    measured = max((one for one in by_bytes if one <= row_bytes), default=min(by_bytes))
    keys = by_bytes[measured].keys
    while keys > LEAST and keys * row_bytes > by_bytes[measured].keys * measured:
        keys //= 2
    return enough_warps(problem, replace(by_bytes[measured], keys=keys)), "heuristic"


def _measured(problem: DecodeProblem) -> DecodeTiles | None:
    """Return the tile sizes measured for this head size and number of tokens, or None if there are none."""
    table = DECODE_TILES if problem.append else PAGED_TILES
    if power_of_two(problem.group) > _MEASURED_GROUP:
        return None
    if problem.cache_dtype != AUTO:
        most = next((tokens for tokens in DECODE_TILES if problem.tokens <= tokens), 0)
        halves = problem.cache_dtype == "f8e4m3" and DTYPES[problem.dtype].itemsize == 2
        known = EIGHT_BIT_TILES if halves and problem.append and problem.form == EQUAL else {}
        return known.get(most, {}).get(problem.row_bytes)
    by_bytes = next((sizes for tokens, sizes in table.items() if problem.tokens <= tokens), {})
    return by_bytes.get(problem.dim * DTYPES[problem.dtype].itemsize)


def enough_warps(problem: DecodeProblem, tiles: DecodeTiles) -> DecodeTiles:
    """Return `tiles` with enough warps: at least one for each 16 q heads that share a head of the cache."""
    return replace(tiles, warps=max(tiles.warps, power_of_two(problem.group) // _WARP_ROWS))


def fitting_tiles(problem: DecodeProblem, sm: int) -> FormTiles:
    """Return the largest tile sizes that fit on compute capability `sm`, for keys and values of different widths.

    The caller has checked that the smallest tiles fit. It has also divided groups of q heads that are too large for a
    tile.
    """
    form = tiled(problem.cache_form, problem.kv_heads, problem.group)
    return form_tiles(tile_widths_of(form, 1, DTYPES[problem.dtype].itemsize), sm, lambda *_: None, form.block_group)
