"""Add the launch of batch-invariant attention. Steps of all sizes run the same machine code."""

import torch

from ingot.backends.triton.kernels.attention.invariant import invariant_attention
from ingot.backends.triton.launches import Expr, Term, cdiv, times
from ingot.backends.triton.lower.attention.form_tiles import FormTiles, form_tiles
from ingot.backends.triton.lower.attention.shapes import attention_of, results_of
from ingot.backends.triton.lower.call import Call
from ingot.backends.triton.schedule import Schedule, Value

# The positions of a split of the context. With few tokens, several programs compute the splits, to fill the device. In
# prefill, each split costs a pass over the accumulators.
SPLIT = 512
# Rows of a tile: the least of a Hopper tensor-core instruction (wgmma).
_ROWS = 64
# Programs per (token, head), by the most tokens of a step: together they fill the device, or nearly. Steps of more
# tokens have enough programs, and the scratch memory of splits would be too large.
_WAYS = {16: 16, 32: 8, 64: 4}


def schedule_invariant(call: Call, schedule: Schedule) -> tuple[Value, ...]:
    """Add the launch of batch-invariant attention for a call to `schedule`, and return its results.

    The results are (attention,) or (attention, log-sum-exp).
    """
    attention = attention_of(call, schedule.sm)
    # Tiles by the capacity of registers and shared memory: two accumulators of 64 rows of 128 elements in 4 warps.
    # Float32 does not use tensor cores and takes a quarter of that.
    wide = attention.itemsize == 4
    tiles = FormTiles(
        _ROWS, 32 if wide or attention.form.block > 128 else 64, 8 if attention.form.block > 128 else 4, 3
    )
    if not attention.equal:
        tiles = form_tiles(attention.tile_widths(2), schedule.sm, call.want, _ROWS)
        attention = attention.divided(tiles.rows)
    elif attention.form.block_group > _ROWS:  # for example Falcon 7B, with 71 q heads for one kv head
        attention = attention.divided(_ROWS)
    form, page = attention.form, attention.cache.layout.page
    kv_heads, heads = form.kv_heads, form.block_group
    rows = max(heads, 16) if wide else tiles.rows
    tile_tokens = rows // heads
    most = schedule.bucket.tokens[1]
    ways = next((ways for tokens, ways in _WAYS.items() if most <= tokens), 1)
    per_split: tuple[Expr, ...] = (1, 1, 1)
    if ways > 1:
        per_split = (attention.tokens, kv_heads, cdiv(times(attention.arguments["width"], page), SPLIT))  # type: ignore[arg-type]  # a size
    blocks = Term(op="add", left=cdiv(attention.tokens, tile_tokens), right=attention.sequences)
    out, lse = results_of(call, schedule)
    schedule.launch(
        invariant_attention,
        (kv_heads, Term(op="min", left=blocks, right=attention.tokens), ways),
        {
            "out": out,
            "lse": lse,
            "partial": schedule.scratch(torch.float32, (*per_split, form.group, form.value_dim)),
            "sizes": schedule.scratch(torch.float32, (*per_split, 2, form.group)),
            "arrived": schedule.counter((most if ways > 1 else 1, kv_heads)),
            **attention.arguments,
            "ways": ways,
        },
        {
            **attention.constants,
            "ASSEMBLY": attention.assembly,
            "TILE_TOKENS": tile_tokens,
            "BLOCK_N": tiles.keys,
            "SPLIT": SPLIT,
            "DEPENDENT": schedule.dependent,
        },
        warps=tiles.warps,
        stages=tiles.stages,
        dependent=schedule.dependent,
    )
    return (out,) if lse is None else (out, lse)
