"""Lowerings of the ops of LoRA adapters: lora_shrink and lora_expand."""

import itertools
from collections.abc import Sequence

import torch

from ingot.backends.triton.kernels.linear.lora import (
    lora_expand_rows,
    lora_expand_tiles,
    lora_shrink_rows,
    lora_shrink_tiles,
)
from ingot.backends.triton.launches import cdiv
from ingot.backends.triton.lower.attention.heads import static
from ingot.backends.triton.lower.call import Call, Lowering
from ingot.backends.triton.lower.rows import want_floats
from ingot.backends.triton.lower.sizes import LEAST, power_of_two
from ingot.backends.triton.schedule import Schedule, Value
from ingot.ir.artifact.plan import GPU_FEW_TOKENS

# Factors that a program holds at once: 32 numbers for each of the 128 threads of 4 warps.
_HELD = 4096
# Ranks of a program of one row. It reads all columns at once, with up to 16 warps: reads that follow each other take as
# long as a launch each.
_RANKS, _MOST_WARPS = 4, 16
# Rows of a tile, columns of x and of y that a program of a tile reads at once, and the most ranks.
_TILE, _TILE_K, _TILE_N, _TILE_R = 64, 64, 128, 64
# Parts of a merged linear: q, k, v, gate and up are 5.
_MOST_PARTS = 8


def _by_rows(schedule: Schedule) -> bool:
    """Return whether each program takes one row. So do steps of few tokens, those with one token of each sequence, and
    those whose rows must have the same bits in every batch."""
    bucket = schedule.bucket
    return bucket.tokens[1] <= GPU_FEW_TOKENS or bucket.q_max == 1 or bucket.batch_invariant


def _precision(dtype: torch.dtype) -> str:
    # The factors are exact in tf32 unless they are float32. The other operand is rounded to 11 bits, as float16 has.
    return "ieee" if dtype is torch.float32 else "tf32"


def _shrink(call: Call, schedule: Schedule) -> tuple[Value, ...]:
    x, a = call.value("x"), call.value("a")
    want_floats(call, "x", "a")
    call.want(x.type.dtype == a.type.dtype, "x and a differ in dtype")
    call.want_dense_rows("x")
    rows, columns, ranks = x.type.shape[0], static(x, 1), static(a, 1)
    out = schedule.output(call.results[0])
    constants = {"RANKS": ranks, "K": columns, "X_ROW": x.strides[0], "DEPENDENT": schedule.dependent}
    given = {"x": x, "slots": call.value("slots"), "a": a, "out": out}
    if _by_rows(schedule):
        block_r = min(_RANKS, power_of_two(ranks))
        warps = max(4, min(_MOST_WARPS, 4 * block_r * power_of_two(columns) // _HELD))
        block_k = min(warps * _HELD // 4 // block_r, power_of_two(columns))
        schedule.launch(
            lora_shrink_rows,
            (rows, cdiv(ranks, block_r)),
            given,
            {**constants, "BLOCK_R": block_r, "BLOCK_K": block_k},
            warps=warps,
            dependent=schedule.dependent,
        )
        return (out,)
    block_r = max(LEAST, min(_TILE_R, power_of_two(ranks)))
    schedule.launch(
        lora_shrink_tiles,
        (cdiv(rows, _TILE), cdiv(ranks, block_r)),
        {**given, "rows": rows},
        {
            **constants,
            "BLOCK_T": _TILE,
            "BLOCK_R": block_r,
            "BLOCK_K": _TILE_K,
            "PRECISION": _precision(x.type.dtype),
        },
        dependent=schedule.dependent,
    )
    return (out,)


def _expand(call: Call, schedule: Schedule) -> tuple[Value, ...]:
    y, b, shrunk = call.value("y"), call.value("b"), call.value("shrunk")
    want_floats(call, "y", "b", "shrunk")
    call.want(y.type.dtype == b.type.dtype, "y and b differ in dtype")
    call.want_dense_rows("y")
    segments: Sequence[int] = call.attributes["segments"]
    call.want(len(segments) <= _MOST_PARTS, f"{len(segments)} parts of a linear, more than {_MOST_PARTS}")
    rows, columns, rank = y.type.shape[0], static(y, 1), static(b, 2)
    ends = list(itertools.accumulate(segments))[:-1]
    out = schedule.output(call.results[0])
    constants = {
        "N": columns,
        "R": rank,
        "RANKS": rank * len(segments),
        "Y_ROW": y.strides[0],
        **{f"END{part}": ends[part] if part < len(ends) else columns for part in range(_MOST_PARTS - 1)},
        "DEPENDENT": schedule.dependent,
    }
    given = {"y": y, "shrunk": shrunk, "slots": call.value("slots"), "b": b, "out": out}
    if _by_rows(schedule) or any(end % _TILE_N for end in ends):
        block_r = min(_TILE_R, power_of_two(rank))
        block_n = _HELD // max(block_r, LEAST)
        schedule.launch(
            lora_expand_rows,
            (rows, cdiv(columns, block_n)),
            given,
            {
                **constants,
                "ALIGNED": all(end % block_n == 0 for end in ends),
                "BLOCK_N": block_n,
                "BLOCK_R": block_r,
            },
            dependent=schedule.dependent,
        )
        return (out,)
    schedule.launch(
        lora_expand_tiles,
        (cdiv(rows, _TILE), cdiv(columns, _TILE_N)),
        {**given, "rows": rows},
        {
            **constants,
            "BLOCK_T": _TILE,
            "BLOCK_N": _TILE_N,
            "BLOCK_R": max(LEAST, min(_TILE_R // 2, power_of_two(rank))),  # float32 takes twice the shared memory
            "PRECISION": _precision(y.type.dtype),
        },
        dependent=schedule.dependent,
    )
    return (out,)


LOWERINGS: dict[str, Lowering] = {"lora_shrink": _shrink, "lora_expand": _expand}
