"""Attention over prefixes that the sequences of a decode step share: the launch before `decode_attention`."""

from typing import NamedTuple

import torch

from ingot.backends.triton.kernels.attention_constants import PrefixSplits
from ingot.backends.triton.kernels.attention_shared import shared_attention
from ingot.backends.triton.kernels.rope import Head
from ingot.backends.triton.launches import Expr, Term, cdiv, times
from ingot.backends.triton.lower.attention_shapes import Attention
from ingot.backends.triton.lower.call import Call
from ingot.backends.triton.lower.sizes import power_of_two
from ingot.backends.triton.schedule import Schedule, Value
from ingot.ir.features.sharing import MOST_GROUPS

# Rows of a tile at most, so that keys are read from the L2 cache for many; a warp group's product of tensor cores has
# 64 of them. The first tile that 16 sequences of 4 heads fill is of that size.
_MOST_ROWS, _LEAST_ROWS = 128, 64
# Splits of a prefix at most: of all sequences so many together as `decode_attention` has of a large step.
_ALL_SPLITS, _MAX_SPLITS, _LEAST_SPLITS = 512, 16, 2


class Prefixes(NamedTuple):
    """What `decode_attention` is given where prefixes are read apart: the table, and results by sequence and split; or
    nothing."""

    sharing: Value | None = None
    attention: Value | None = None
    sizes: Value | None = None
    splits: Value | None = None
    cut: PrefixSplits | None = None


def sharing_of(call: Call, attention: Attention, schedule: Schedule) -> Value | None:
    """The table of shared prefixes, where steps of the bucket class may have several sequences. A cache that is not of
    equal widths is read for each of them."""
    return call.optional("sharing") if schedule.bucket.tokens[1] > 1 and attention.equal else None


def when(sharing: Value, *, shared: bool) -> Expr:
    """1 in steps with shared prefixes if `shared`, and else in those without; 0 in the others."""
    rows = Term(op="min", left=sharing.type.shape[0], right=2)
    return Term(op="sub", left=rows, right=1) if shared else Term(op="sub", left=2, right=rows)


def _keys(rows: int, dim: int) -> int:
    """Keys of a tile. Measured on an H200 with 64 sequences that share 8192 positions, heads of 64 and 128: 128 keys
    take 0.92 and 0.89 of the time of 64; with tiles of 64 rows 64 keys are faster, and wide heads fill registers."""
    if dim > 128:
        return 32
    return 128 if rows == _MOST_ROWS else 64


def schedule_shared(
    call: Call, attention: Attention, schedule: Schedule, sharing: Value, head: Head | None
) -> Prefixes:
    """Adds the launch. `head` says how q is prepared; None where it already is."""
    kv_heads, group, dim = attention.form.kv_heads, attention.form.group, attention.form.value_dim
    rows, most = sharing.type.shape[0], schedule.bucket.tokens[1]
    wide = attention.itemsize == 4
    # Without tensor cores, which float32 does not use, a tile has a quarter of the rows. Wider heads fill registers.
    largest = _LEAST_ROWS if attention.form.block > 128 else _MOST_ROWS
    block = min(largest, max(_LEAST_ROWS, power_of_two(most * group))) // (4 if wide else 1)
    # Each group has a tile that is not full.
    tiles = Term(op="add", left=cdiv(times(rows, group), block), right=Term(op="min", left=rows, right=MOST_GROUPS))
    # A tile has an item at least; the others are as many as multiprocessors.
    programs = max(1, schedule.cores // kv_heads)
    items = Term(op="add", left=tiles, right=programs)
    most_splits = min(_MAX_SPLITS, max(_LEAST_SPLITS, _ALL_SPLITS // power_of_two(most)))
    results = (
        schedule.scratch(torch.float32, (rows, kv_heads, most_splits, group, dim)),
        schedule.scratch(torch.float32, (rows, kv_heads, most_splits, group)),
        schedule.scratch(torch.int32, (rows,)),
    )
    cut = PrefixSplits(programs, most_splits, MOST_GROUPS)
    append = head is not None
    given = attention.arguments
    schedule.launch(
        shared_attention,
        (times(times(items, kv_heads), when(sharing, shared=True)), 1, 1),
        {
            "out": results[0],
            "sizes": results[1],
            "out_splits": results[2],
            **{name: given[name] for name in ("kv", "q", "page_table", "q_starts", "slopes", "width")},
            "kv_lens": given["kv_lens"] if given["slopes"] is not None else None,
            "positions": call.value("positions") if append else None,
            "table": call.value("table") if append else None,
            "q_weight": call.optional("q_weight") if append else None,
            "sharing": sharing,
            "rows": rows,
        },
        {
            **attention.constants,
            "HEAD": head,
            "BLOCK_M": block,
            "BLOCK_N": 16 if wide else _keys(block, attention.form.block),
            "PREFIXES": cut,
            "DEPENDENT": schedule.dependent,
        },
        warps=8 if block == _MOST_ROWS else 4,
        stages=3,
        dependent=schedule.dependent,
    )
    return Prefixes(sharing, *results, cut)
