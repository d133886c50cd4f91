"""Lowering of `sparse_attention`: attention of each token over the positions that are chosen for it."""

from collections.abc import Mapping

import torch

from ingot.backends.triton.kernels.attention.constants import Splits
from ingot.backends.triton.kernels.attention.sparse import sparse_attention
from ingot.backends.triton.launches import WARP, times
from ingot.backends.triton.lower.attention.form_tiles import form_tiles
from ingot.backends.triton.lower.attention.heads import static
from ingot.backends.triton.lower.attention.merge import schedule_merge, split_results
from ingot.backends.triton.lower.attention.paged import decodes
from ingot.backends.triton.lower.attention.shapes import Attention, attention_of
from ingot.backends.triton.lower.call import Call, Lowering
from ingot.backends.triton.lower.rows import want_floats
from ingot.backends.triton.lower.sizes import LEAST, power_of_two
from ingot.backends.triton.schedule import Schedule, Value

# Most rows of a tile, q heads of one token. With more rows, fewer programs read the same positions.
_MOST_ROWS = 64
# Most splits of a token's list.
_MOST_SPLITS = 16
# The positions of a list that fit into a program's registers: 32 for each of 256 threads.
_MOST_LISTED = 1 << 13


def _rows(attention: Attention, schedule: Schedule, *, divides: bool) -> int:
    """Return the most rows of a tile: as many as leave each multiprocessor a split, if splits divide a list."""
    group, rows = attention.form.block_group, _MOST_ROWS
    while divides and rows > LEAST:
        tiles = schedule.bucket.tokens[1] * attention.form.kv_heads * max(1, group // rows)
        if tiles * _MOST_SPLITS >= schedule.cores:
            break
        rows //= 2
    return rows


def _sparse_attention(call: Call, schedule: Schedule) -> tuple[Value, ...]:
    want_floats(call, "q")
    call.want_dense_rows("chosen")
    chosen, most = call.value("chosen"), schedule.bucket.tokens[1]
    listed = static(chosen, 1)
    call.want(listed <= _MOST_LISTED, f"{listed} chosen positions of a token, more than {_MOST_LISTED}")
    call.want(chosen.strides[0] == listed, f"the chosen positions are strided: {chosen.type}")
    attention = attention_of(call, schedule.sm)
    # In batch-invariant bucket classes, no step divides a list, so that sums have one order.
    divides = decodes(schedule.bucket) and not schedule.bucket.batch_invariant
    rows = min(_rows(attention, schedule, divides=divides), max(LEAST, attention.form.block_group))
    tiles = form_tiles(attention.tile_widths(1), schedule.sm, call.want, rows)
    attention = attention.divided(tiles.rows)
    form = attention.form
    splits = 1
    if divides:
        programs = most * form.kv_heads
        splits = max(1, min(_MOST_SPLITS, schedule.cores // programs, -(-listed // tiles.keys)))
    # Blocks of a split are full, but for the last one of a list.
    chunk = -(-listed // (splits * tiles.keys)) * tiles.keys
    splits = -(-listed // chunk)
    cut = Splits(
        chunk=chunk, base=splits, shares=0, most=splits, at_once=1, heads_at_once=1, scan=WARP * tiles.warps,
        single=False, fed_apart=False, apart=True,
    )  # fmt: skip
    tokens = attention.tokens
    merged: dict[str, Value | None] = dict.fromkeys(("partial", "sizes", "used"))
    if splits > 1:
        used = schedule.scratch(torch.int32, (tokens, form.kv_heads))
        merged = {**split_results(schedule, tokens, form, cut), "used": used}
    out = schedule.output(call.results[0])
    given = ("kv", "q", "page_table", "q_starts", "q_lens", "sequences", "width")
    schedule.launch(
        sparse_attention,
        (times(tokens, form.kv_heads * splits),),
        {
            "out": out,
            **merged,
            "chosen": chosen,
            **{name: attention.arguments[name] for name in given},
        },
        {
            **attention.constants,
            "SPLITS": cut,
            "LISTED": listed,
            "BLOCK_LISTED": power_of_two(listed),
            "BLOCK_N": tiles.keys,
            "DEPENDENT": schedule.dependent,
        },
        warps=tiles.warps,
        stages=tiles.stages,
        dependent=schedule.dependent,
    )
    if splits > 1:
        starts = attention.arguments["q_starts"]
        schedule_merge(schedule, tokens, form, cut, {"out": out, "lse": None, **merged, "q_starts": starts})
    return (out,)


LOWERINGS: Mapping[str, Lowering] = {"sparse_attention": _sparse_attention}
