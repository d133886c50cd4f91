"""Lowerings of attention over the paged cache: one kernel for steps of few tokens, another one for prefill."""

from collections.abc import Mapping
from typing import Any

from ingot.backends.triton.kernels.attention_decode import decode_attention
from ingot.backends.triton.kernels.attention_prefill import prefill_attention
from ingot.backends.triton.launches import Expr, Term, cdiv, times
from ingot.backends.triton.lower.call import Call, Lowering
from ingot.backends.triton.lower.heads import Cache, cache_of, dim_constants, power_of_two, static, strides_of, want_one_dtype
from ingot.backends.triton.lower.rope import norms_of, rotation
from ingot.backends.triton.schedule import Schedule, Value
from ingot.ir.types import TensorType

import torch

# The largest step that is decoded: a token is a program's business there. Larger ones take tokens in blocks.
_DECODE_TOKENS = 64
# Programs for each multiprocessor: two fit by shared memory, and together keep enough bytes in flight.
_PROGRAMS_PER_CORE = 2
# Splits that a tile of statistics holds.
_MAX_SPLITS = 64
# Elements of a tile of partial results, 64 a thread of 4 warps.
_COMBINED = 8192


def _paged_attention(call: Call, schedule: Schedule) -> tuple[Value, ...]:
    if schedule.bucket.tokens[1] <= _DECODE_TOKENS:
        return _decode(call, schedule, append=False)
    return _prefill(call, schedule)


def _append_attention(call: Call, schedule: Schedule) -> tuple[Value, ...]:
    high = schedule.bucket.tokens[1]
    call.want(high <= _DECODE_TOKENS, f"steps of up to {high} tokens, more than {_DECODE_TOKENS}, take it apart")
    want_one_dtype(call, "kv", "k", "v")
    return _decode(call, schedule, append=True)


def _decode(call: Call, schedule: Schedule, *, append: bool) -> tuple[Value, ...]:
    cache, group, constants = _shapes(call)
    most_tokens = schedule.bucket.tokens[1]
    shares = max(1, _PROGRAMS_PER_CORE * schedule.cores // cache.kv_heads)
    tokens, sequences, width = _sizes(call)
    items = times(Term(op="add", left=tokens, right=shares), cache.kv_heads)
    out = schedule.output(call.results[0])
    block_n = _block_n(call, constants["BLOCK_DIM"])
    heads = power_of_two(group)
    arguments: dict[str, Value | Expr | None] = {
        "out": out,
        "partial": schedule.scratch(torch.float32, (items, group, cache.dim)),
        "stats": schedule.scratch(torch.float32, (items, 2, group)),
        "arrived": schedule.counter((most_tokens, cache.kv_heads)),
        **dict.fromkeys(("k", "v", "positions", "table", "slots", "q_weight", "k_weight")),
        **_common_arguments(call),
        "tokens": tokens,
        "sequences": sequences,
        "width": width,
    }
    prologue: dict[str, Any] = {"EPS": 0.0, "ROTARY": 0, "INTERLEAVED": False}
    strides = {"K_TOKEN": 0, "K_HEAD": 0, "V_TOKEN": 0, "V_HEAD": 0}
    if append:
        arguments |= {name: call.value(name) for name in ("k", "v", "positions", "table", "slots")}
        arguments |= norms_of(call)
        prologue = {"EPS": float(call.attributes["eps"]), **rotation(call)}
        strides = strides_of(call, "k", "v")
    schedule.launch(
        decode_attention,
        (items, 1, 1),
        arguments,
        {
            **constants,
            **prologue,
            **strides,
            "APPEND": append,
            "BLOCK_GROUP": max(16, heads),
            "BLOCK_N": block_n,
            "SHARES": shares,
            "MIN_SHARE": block_n,
            "MAX_SPLITS": _MAX_SPLITS,
            "BLOCK_HEADS": heads,
            "BLOCK_SPLITS": max(1, _COMBINED // (heads * constants["BLOCK_DIM"])),
            "DEPENDENT": schedule.dependent,
        },
        warps=4,
        stages=3,
        dependent=schedule.dependent,
    )
    return (out,)


def _prefill(call: Call, schedule: Schedule) -> tuple[Value, ...]:
    cache, group, constants = _shapes(call)
    tokens, sequences, width = _sizes(call)
    wide = call.dtype_name("q") == "f32"
    block_m = 64 if wide or constants["BLOCK_DIM"] > 128 else 128
    out = schedule.output(call.results[0])
    blocks = Term(op="add", left=cdiv(tokens, block_m), right=sequences)
    schedule.launch(
        prefill_attention,
        (cache.kv_heads * group, blocks, 1),
        {"out": out, **_common_arguments(call), "tokens": tokens, "sequences": sequences, "width": width},
        {
            **constants,
            "BLOCK_M": block_m,
            "BLOCK_N": _block_n(call, constants["BLOCK_DIM"]),
            "DEPENDENT": schedule.dependent,
        },
        warps=8 if block_m == 128 else 4,
        stages=2,
        dependent=schedule.dependent,
    )
    return (out,)


def _block_n(call: Call, block_dim: int) -> int:
    """Keys of a tile: 64 of 128 elements of two bytes, of which a multiprocessor's shared memory holds three pairs of
    keys and values for each of two programs."""
    size = call.value("q").type.dtype.itemsize
    return max(16, min(64, 64 * 128 * 2 // (block_dim * size)))


def _shapes(call: Call) -> tuple[Cache, int, dict[str, Any]]:
    """The cache, the heads of q for each of its heads, and constants of every attention kernel."""
    cache = cache_of(call)
    want_one_dtype(call, "kv", "q")
    heads = static(call.value("q"), 1)
    soft_cap = call.attributes.get("soft_cap")
    constants = {
        **strides_of(call, "q"),
        **cache.constants(),
        **dim_constants(call, "q"),
        "GROUP": heads // cache.kv_heads,
        "SCALE": float(call.attributes["scale"]),
        "WINDOW": call.attributes.get("window"),
        "SOFT_CAP": None if soft_cap is None else float(soft_cap),
    }
    return cache, heads // cache.kv_heads, constants


def _sizes(call: Call) -> tuple[Expr, Expr, Expr]:
    """T, B and P."""
    page_table: TensorType = call.value("page_table").type
    return call.value("q").type.shape[0], call.value("q_starts").type.shape[0], page_table.shape[1]


def _common_arguments(call: Call) -> dict[str, Value | Expr | None]:
    names = ("kv", "q", "page_table", "q_starts", "q_lens", "kv_lens")
    return {**{name: call.value(name) for name in names}, "sinks": call.optional("sinks")}


LOWERINGS: Mapping[str, Lowering] = {
    "append_attention": _append_attention,
    "paged_attention": _paged_attention,
}
