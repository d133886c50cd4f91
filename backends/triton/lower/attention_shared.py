"""Attention over prefixes that the sequences of a decode step share: the launch in front of `decode_attention`."""

from typing import Any, NamedTuple

import torch

from ingot.backends.triton.kernels.attention_shared import shared_attention
from ingot.backends.triton.launches import Expr, Term, cdiv, times
from ingot.backends.triton.lower.attention_shapes import Attention
from ingot.backends.triton.lower.call import Call
from ingot.backends.triton.schedule import Schedule, Value
from ingot.ir.features.sharing import MOST_GROUPS

# Rows of a tile: a warp group's product of tensor cores has 64.
_ROWS = 64
# Splits of a prefix at most: a program puts the splits of a tile together one after the other.
_MAX_SPLITS = 32


class Prefixes(NamedTuple):
    """What `decode_attention` is given where prefixes are read apart: the table, and results by sequence."""

    sharing: Value
    attention: Value
    sizes: Value


def sharing_of(call: Call, schedule: Schedule) -> Value | None:
    """The table of shared prefixes, where steps of the bucket class may have several sequences."""
    return call.optional("sharing") if schedule.bucket.tokens[1] > 1 else None


def when(sharing: Value, *, shared: bool) -> Expr:
    """1 in steps with shared prefixes if `shared`, and else in those without; 0 in the others."""
    rows = Term(op="min", left=sharing.type.shape[0], right=2)
    return Term(op="sub", left=rows, right=1) if shared else Term(op="sub", left=2, right=rows)


def schedule_shared(
    call: Call, attention: Attention, schedule: Schedule, sharing: Value, fixed: dict[str, Any]
) -> Prefixes:
    """Adds the launch. `fixed` are constants of `decode_attention` that say how q is prepared."""
    cache, dim = attention.cache, attention.cache.dim
    rows = sharing.type.shape[0]
    # A group has two members at least, and a tile that is not full.
    most = schedule.bucket.tokens[1]
    tiles = Term(
        op="add", left=cdiv(times(rows, attention.group), _ROWS), right=Term(op="min", left=rows, right=MOST_GROUPS)
    )
    # As many programs as run at once where two share a multiprocessor; a tile has an item at least.
    programs = max(1, 2 * schedule.cores // cache.kv_heads)
    items = Term(op="add", left=tiles, right=programs)
    results = (
        schedule.scratch(torch.float32, (rows, cache.kv_heads, attention.group, dim)),
        schedule.scratch(torch.float32, (rows, cache.kv_heads, attention.group)),
    )
    wide = attention.itemsize == 4
    append = fixed["HEAD"] is not None
    given = attention.arguments
    schedule.launch(
        shared_attention,
        (times(times(items, cache.kv_heads), when(sharing, shared=True)), 1, 1),
        {
            "out": results[0],
            "out_sizes": results[1],
            "partial": schedule.scratch(torch.float32, (items, cache.kv_heads, _ROWS, dim)),
            "sizes": schedule.scratch(torch.float32, (items, cache.kv_heads, _ROWS)),
            "arrived": schedule.counter((-(-most * attention.group // _ROWS) + MOST_GROUPS, cache.kv_heads)),
            **{name: given[name] for name in ("kv", "q", "page_table", "q_starts", "width")},
            "positions": call.value("positions") if append else None,
            "table": call.value("table") if append else None,
            "q_weight": call.optional("q_weight") if append else None,
            "sharing": sharing,
            "rows": rows,
        },
        {
            **{name: attention.constants[name] for name in _CONSTANTS},
            **{name: fixed[name] for name in ("EPS", "HEAD")},
            "APPEND": append,
            "BLOCK_M": _ROWS,
            # By what shared memory holds of keys and values in flight, and without tensor cores a quarter of it.
            "BLOCK_N": 16 if wide else 64 if attention.block_dim <= 128 else 32,
            "PROGRAMS": programs,
            "MAX_SPLITS": _MAX_SPLITS,
            "GROUPS": MOST_GROUPS,
            "DEPENDENT": schedule.dependent,
        },
        warps=4 if attention.block_dim <= 64 else 8,
        stages=3,
        dependent=schedule.dependent,
    )
    return Prefixes(sharing, *results)


_CONSTANTS = (
    *("Q_TOKEN", "Q_HEAD", "PAGE_STRIDE", "PART_STRIDE", "SLOT_STRIDE", "PAGE", "KV_HEADS", "GROUP"),
    *("SCALE", "SOFT_CAP", "DIM", "BLOCK_DIM"),
)
