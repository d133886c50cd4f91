"""Add the launch of `shared_attention`, which reads prefixes that several sequences of a decode step share (cascade).

It runs before `decode_attention`, which merges its results.
"""

from typing import NamedTuple

import torch

from ingot.backends.triton.kernels.attention.constants import PrefixSplits
from ingot.backends.triton.kernels.attention.shared import shared_attention
from ingot.backends.triton.kernels.rope import Head
from ingot.backends.triton.launches import Expr, Term, cdiv, times
from ingot.backends.triton.lower.attention.shapes import Attention
from ingot.backends.triton.lower.call import Call
from ingot.backends.triton.lower.sizes import power_of_two
from ingot.backends.triton.schedule import Schedule, Value
from ingot.ir.features.sharing import MOST_GROUPS

# Most and least rows of a tile. With many rows, one read of keys from the L2 cache serves many. A warp group's
# tensor-core instruction has 64 rows, which 16 sequences of 4 heads fill.
_MOST_ROWS, _LEAST_ROWS = 128, 64
# Most splits of the prefixes of all sequences together, as many as `decode_attention` has in a large step. Then most
# splits of one prefix, and the least that this limit may be.
_ALL_SPLITS, _MAX_SPLITS, _LEAST_SPLITS = 512, 16, 2


class Prefixes(NamedTuple):
    """The arguments of `decode_attention` for shared prefixes. All are None in steps without shared prefixes.

    `sharing` is the table of prefixes and their sequences. `cut` says how prefixes were divided into splits.
    `attention` holds the attention of each sequence over each split, and `sizes` the logarithm of the split's sum of
    weights. `splits` is the number of splits of each sequence.
    """

    sharing: Value | None = None
    attention: Value | None = None
    sizes: Value | None = None
    splits: Value | None = None
    cut: PrefixSplits | None = None


def sharing_of(call: Call, attention: Attention, schedule: Schedule) -> Value | None:
    """Return the call's table of shared prefixes, or None if the kernels read each sequence's prefix separately.

    It is None for steps of one token. It is also None if keys and values differ in width, which the kernel does not
    support.
    """
    return call.optional("sharing") if schedule.bucket.tokens[1] > 1 and attention.equal else None


def when(sharing: Value, *, shared: bool) -> Expr:
    """Return a factor for the grid of a launch, 1 or 0. The factor 0 skips the launch.

    With `shared`, it is 1 in steps with shared prefixes, and 0 in other steps. Without `shared`, it is 0 in steps with
    shared prefixes, and 1 in others. `sharing` is the table of shared prefixes.
    """
    rows = Term(op="min", left=sharing.type.shape[0], right=2)
    return Term(op="sub", left=rows, right=1) if shared else Term(op="sub", left=2, right=rows)


def _keys(rows: int, dim: int) -> int:
    """Return how many keys a tile has, for `rows` rows of queries and heads of `dim` elements.

    Heads above 128 elements fill the registers, so they get 32 keys. Otherwise, tiles of 128 rows are faster with 128
    keys, and tiles of 64 rows with 64. On an H200, with 64 sequences that share 8192 positions, 128 keys take 0.92
    (heads of 64) and 0.89 (heads of 128) of the time of 64 keys.
    """
    if dim > 128:
        return 32
    return 128 if rows == _MOST_ROWS else 64


def schedule_shared(
    call: Call, attention: Attention, schedule: Schedule, sharing: Value, head: Head | None
) -> Prefixes:
    """Add the launch of `shared_attention` to `schedule`. Return its results, as arguments for `decode_attention`.

    `sharing` is the table of shared prefixes. `head` says how to norm and rotate q, or is None if q needs neither.
    """
    kv_heads, group, dim = attention.form.kv_heads, attention.form.group, attention.form.value_dim
    rows, most = sharing.type.shape[0], schedule.bucket.tokens[1]
    wide = attention.itemsize == 4
    # Float32 does not use tensor cores: its tiles have a quarter of the rows. Heads above 128 elements fill registers.
    largest = _LEAST_ROWS if attention.form.block > 128 else _MOST_ROWS
    block = min(largest, max(_LEAST_ROWS, power_of_two(most * group))) // (4 if wide else 1)
    # Each group may have one partial tile.
    tiles = Term(op="add", left=cdiv(times(rows, group), block), right=Term(op="min", left=rows, right=MOST_GROUPS))
    # Each tile has at least one item; the further items, over all heads, are as many as multiprocessors.
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
            "ASSEMBLY": attention.assembly,
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
