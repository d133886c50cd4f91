"""Choose tile sizes for decode attention: those of the most similar measured problem, or the largest that fit."""

from dataclasses import replace

from ingot.backends.triton.lower.attention.form_tiles import FormTiles, TileWidths, form_tiles
from ingot.backends.triton.lower.attention.problem import AUTO, EQUAL, DecodeProblem
from ingot.backends.triton.lower.attention.shapes import tile_widths_of, tiled
from ingot.backends.triton.lower.attention.tiles import (
    DECODE_TILES,
    EIGHT_BIT_TILES,
    LATENT_EIGHT_BIT_TILES,
    LATENT_TILES,
    PAGED_TILES,
    DecodeTiles,
)
from ingot.backends.triton.lower.shared_memory import shared_memory
from ingot.backends.triton.lower.sizes import LEAST, power_of_two
from ingot.ir.artifact.tuning import Source
from ingot.ir.cache.form import CacheForm
from ingot.ir.types import DTYPES

# Most rows of a tile per warp; rows are the q heads that read one cache head. For the 71 heads of Falcon 7B, 8 warps
# are faster than 4 on an H200, and 2 warps spill registers.
_WARP_ROWS = 16
_MEASURED_GROUP = 32  # most q heads per cache head in the measured problems
# The latents of the measured problems: those of DeepSeek V2, V3 and the models built like them.
_MEASURED_LATENTS = CacheForm(576, 512, shared=True)
# Most q heads of a tile for caches of unequal widths, where up to 128 q heads may read one cache head. A tile of 64
# rows is that of a warpgroup's matmul (wgmma). With one token, more programs with fewer heads each are faster up to
# 2048 positions: 13 and 17 us against 18 and 20 us for 128 heads over 512 and 2048 latents on an H200.
_MOST_HEADS, _MOST_HEADS_OF_ONE = 64, 32


def known_tiles(problem: DecodeProblem, sm: int) -> tuple[DecodeTiles, Source]:
    """Return the tile sizes of a decode attention that was not tuned, and their source.

    The source is "table" if the sizes were measured for these sizes and dtypes, else "heuristic". The heuristic uses
    the most tokens of a step and the bytes of a head in a tile. Heads wider than any measured one get fewer keys per
    tile. If keys and values differ in width and were not measured, it chooses the largest tiles that fit on compute
    capability `sm`.
    """
    if not problem.cache_form.equal:
        if (timed := _measured_latents(problem, sm)) is not None:
            return timed, "table"
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


def most_heads(tokens: int) -> int:
    """Return the most q heads of a tile in steps of up to `tokens` tokens, for caches of unequal widths."""
    return _MOST_HEADS_OF_ONE if tokens == 1 else _MOST_HEADS


def _measured_latents(problem: DecodeProblem, sm: int) -> DecodeTiles | None:
    """Return the tile sizes measured for latents, or None if there are none that fit on compute capability `sm`.

    They fit if a block holds a program, and a multiprocessor all programs among which a context is split for it.
    """
    tables = {AUTO: LATENT_TILES, "f8e4m3": LATENT_EIGHT_BIT_TILES}
    if problem.cache_form != _MEASURED_LATENTS or DTYPES[problem.dtype].itemsize != 2:
        return None
    rows = max(LEAST, power_of_two(problem.group))
    by_tokens = tables.get(problem.cache_dtype, {}).get(rows, {})
    timed = by_tokens.get(max((tokens for tokens in by_tokens if tokens <= problem.tokens), default=0))
    if timed is None:
        return None
    # A block needs room for converted elements of an 8-bit cache too: compiled for sm_90 by Triton 3.6.0, 64 heads over
    # f8e4m3 take 184,832 bytes, and 155,648 would hold what is loaded. Programs that share a multiprocessor have 16
    # heads, whose elements are converted in registers: they take 76,288 of 94,208 bytes.
    widths, cached = _widths_of(problem), DTYPES[problem.cached_as].itemsize
    fits = widths.shared(rows, timed.keys) <= shared_memory(sm)
    fits &= timed.programs * widths.shared(rows, timed.keys, cached) <= shared_memory(sm)
    return timed if fits else None


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
    return form_tiles(_widths_of(problem), sm, lambda *_: None, power_of_two(problem.group))


def _widths_of(problem: DecodeProblem) -> TileWidths:
    form = tiled(problem.cache_form, problem.kv_heads, problem.group)
    return tile_widths_of(form, 1, DTYPES[problem.dtype].itemsize)
