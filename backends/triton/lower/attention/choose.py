"""Lowering of `paged_choose_positions`: the scores of all positions that a token sees, and the choice of the best."""

from collections.abc import Mapping

import torch

from ingot.backends.triton.kernels.attention import choose as kernels
from ingot.backends.triton.kernels.attention.constants import Fed, Layout
from ingot.backends.triton.launches import WARP, Expr, cdiv, greatest, least, minus, times
from ingot.backends.triton.lower.attention.heads import WIDEST, static, strides_of, want_one_dtype
from ingot.backends.triton.lower.call import Call, Lowering
from ingot.backends.triton.lower.rows import FLOATS
from ingot.backends.triton.lower.sizes import tile_width
from ingot.backends.triton.schedule import Schedule, Value

# Most heads of an indexer: their queries of 128 elements fill a third of a block's shared memory.
_MOST_HEADS = 128
# Tokens whose scores are in memory at once. For contexts of 128k positions, they take 512 MB. Larger steps take rounds.
_ROUND = 1024
# Programs per multiprocessor that score positions. With fewer tokens, several programs share a token.
_PROGRAMS = 4
# Positions that a program scores at a time, and their warps: rows of two warp groups' tensor-core instructions. Float32
# does not use tensor cores, and takes fewer.
_POSITIONS, _WIDE_POSITIONS, _WARPS = 128, 32, 8
# Scores that a program reads at a time when it chooses, 8 for each thread of 16 warps.
_SCORES, _CHOOSING_WARPS = 4096, 16


def _layout(keys: Value) -> Layout:
    """Return the memory layout of a cache of keys."""
    page_stride, part_stride, slot_stride, head_stride, _ = keys.strides
    return Layout(static(keys, 2), page_stride, part_stride, slot_stride, head_stride)


def _paged_choose_positions(call: Call, schedule: Schedule) -> tuple[Value, ...]:
    q, keys, weights, table = (call.value(name) for name in ("q", "keys", "weights", "page_table"))
    call.want(q.type.dtype in FLOATS, f"kernels compute on f32, bf16 and f16: {q.type}")
    want_one_dtype(call, "q", "keys")
    call.want_dense_rows("q", "keys", "weights")
    call.want(weights.type.dtype is torch.float32, f"the weights of heads are not f32: {weights.type}")
    heads, width = static(q, 1), static(q, 2)
    call.want(heads <= _MOST_HEADS, f"{heads} heads of an indexer, more than {_MOST_HEADS}")
    call.want(width <= WIDEST, f"keys of {width} elements, more than {WIDEST}")
    layout, top_k = _layout(keys), call.attributes["top_k"]
    tokens, most = q.type.shape[0], schedule.bucket.tokens[1]
    sequences, pages = call.value("q_starts").type.shape[0], table.type.shape[1]
    stored = times(pages, layout.page)
    scores = schedule.scratch(torch.float32, (least(tokens, _ROUND), stored))
    chosen = schedule.output(call.results[0])
    lens: dict[str, Value] = {name: call.value(name) for name in ("q_starts", "q_lens", "kv_lens")}
    for first in range(0, most, _ROUND):
        count = least(greatest(minus(tokens, first), 0), _ROUND)
        sharing: Expr = greatest(cdiv(_PROGRAMS * schedule.cores, greatest(count, 1)), 1)
        schedule.launch(
            kernels.index_scores,
            (count, sharing),
            {
                "scores": scores,
                "q": q,
                "keys": keys,
                "weights": weights,
                "page_table": table,
                **lens,
                "first": first,
                "sequences": sequences,
                "width": pages,
            },
            {
                "FED": Fed(strides_of(call, "q")),
                "CACHE": layout,
                "HEADS": heads,
                "WIDTH": width,
                "WEIGHTS_ROW": weights.strides[0],
                "TOP_K": top_k,
                "BLOCK_HEADS": tile_width(heads),
                "BLOCK_WIDTH": tile_width(width),
                "BLOCK_N": _WIDE_POSITIONS if q.type.dtype.itemsize == 4 else _POSITIONS,
                "SCAN": WARP * _WARPS,
                "DEPENDENT": schedule.dependent,
            },
            warps=_WARPS,
            dependent=schedule.dependent,
        )
        schedule.launch(
            kernels.choose,
            (count,),
            {"chosen": chosen, "scores": scores, **lens, "first": first, "sequences": sequences, "stored": stored},
            {
                "TOP_K": top_k,
                "BLOCK": _SCORES,
                "SCAN": WARP * _CHOOSING_WARPS,
                "DEPENDENT": schedule.dependent,
            },
            warps=_CHOOSING_WARPS,
            dependent=schedule.dependent,
        )
    return (chosen,)


LOWERINGS: Mapping[str, Lowering] = {"paged_choose_positions": _paged_choose_positions}
